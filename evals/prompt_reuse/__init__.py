"""MPIC's insights and VLCache's schedules, measured on the tasks whose images go through the real preprocessing."""
