"""No tasks of our own: lmms-eval wants the folder of every plugin."""
