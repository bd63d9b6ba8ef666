"""What each path answers: one file for a path, or for two that answer alike. Everything around it is in app.py."""
