"""What the connector decides, without the engine."""
