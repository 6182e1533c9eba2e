"""Structure of deficits, and estimates of them without the conditioned forward. Kamera §4, App. B, App. C.3."""
