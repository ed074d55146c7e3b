"""The paper's study on a pair of one's own: its experiments, the checks and the questions that it left open."""
