probe_recall = probe_reorder = probe_slide = None
