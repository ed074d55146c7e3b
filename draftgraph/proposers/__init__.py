"""Who proposes edges of the graph: a draft model, the text so far, recycled choices of the target; and how what they
say is pooled, calibrated and grown into a graph."""
