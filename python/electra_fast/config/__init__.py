"""The configuration of a run: its sections, presets, and TOML files."""
