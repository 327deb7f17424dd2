"""The networks: layers, attention, encoders, heads, and the `Electra` model made of them."""
