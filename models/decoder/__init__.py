"""One decoder for all families: configuration, layers, attention, experts, weights, sharding."""
