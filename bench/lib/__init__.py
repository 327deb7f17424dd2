"""Code that the scripts of bench/ share."""
