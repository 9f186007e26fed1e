"""Command lines and YAML files: how both become the Config of a command."""
