"""How a second machine joins: an invitation on the first one, a code that a person types, and what is handed over."""
