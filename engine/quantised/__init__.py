"""Published formats of quantised weights, read exactly into :class:`engine.grouped_weight.GroupedWeight`."""
