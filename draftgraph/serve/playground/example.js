// A step to look at before the first question.

const tree = [
  // text, parent, source, score, accepted
  [" is", -1, "root", 1, true],
  [" blue", 0, "draft", 0.71, true],
  [" because", 1, "draft", 0.52, true],
  [" of", 2, "copied", 0.44, true],
  [" the", 2, "draft", 0.21, false],
  [",", 1, "draft", 0.12, false],
  [" mostly", 0, "draft", 0.16, false],
  [" blue", 6, "draft", 0.11, false],
  [" because", 7, "merged", 0.08, false],
  [" of", 8, "copied", 0.06, false],
  [" a", 0, "recycled", 0.07, false],
  [" colour", 10, "draft", 0.03, false],
];

export const EXAMPLE = {
  nodes: tree.map(([text, parent, source, score, accepted], token) => ({ token, text, parent, source, score, accepted })),
  merges: [[2, 8], [3, 9]],
  tokens: [
    { id: 1, text: " blue", source: "draft" },
    { id: 2, text: " because", source: "draft" },
    { id: 3, text: " of", source: "copied" },
    { id: 12, text: " Rayleigh", source: "target" },
  ],
};
