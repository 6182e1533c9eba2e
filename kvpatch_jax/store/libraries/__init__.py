"""Named resources that prompts refer to, static and dynamic, and finding them by content."""
