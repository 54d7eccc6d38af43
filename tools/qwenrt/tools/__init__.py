"""The `qwenrt` command."""
