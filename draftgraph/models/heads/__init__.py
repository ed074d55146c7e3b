"""Trained heads: drafts that read their target's hidden states, in the formats in which they are published."""
