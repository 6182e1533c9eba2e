"""From images and messages to what a backbone embeds: pixels, positions, templates, buckets."""
