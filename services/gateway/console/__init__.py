"""The console: a page for operators at /console, live figures of the cluster behind it (docs/console.md)."""
