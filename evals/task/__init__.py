"""The one task of the evaluation: bills after price lists, charts after keys, screens after settings."""
