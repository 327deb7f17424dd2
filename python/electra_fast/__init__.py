"""Pre-train text encoders by replaced-token detection (ELECTRA)."""
