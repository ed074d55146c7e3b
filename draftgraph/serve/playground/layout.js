// Where things go in a picture of a step, as in draftgraph/inspect/layout.py: one column per depth. The accepted child,
// else the first, stands on its parent's own line, so the accepted path reads as a line of text on top.

export const ROW = 33, GUTTER = 30, HEIGHT = 25;

/** Boxes {left, right, center, middle, columnRight} for nodes {parent, accepted} of these widths; parents come first. */
export function layered(nodes, widths) {
  const depths = [], children = nodes.map(() => []);
  nodes.forEach(({ parent }, node) => {
    depths.push(parent < 0 ? 0 : depths[parent] + 1);
    if (parent >= 0) children[parent].push(node);
  });
  for (const line of children) line.sort((one, other) => nodes[other].accepted - nodes[one].accepted || one - other);
  const rows = rowsOf(children, depths);
  const columns = new Array(Math.max(...depths) + 1).fill(0);
  depths.forEach((depth, node) => { columns[depth] = Math.max(columns[depth], widths[node]); });
  const lefts = [0];
  for (const column of columns) lefts.push(lefts.at(-1) + column + GUTTER);
  return nodes.map((_, node) => {
    const left = lefts[depths[node]], width = widths[node];
    return {
      left, width, right: left + width, center: left + width / 2,
      middle: rows[node] * ROW + HEIGHT / 2,
      columnRight: left + columns[depths[node]],
    };
  });
}

/** A row for each node: its parent's for a first child, else the first that is free down its own line. */
function rowsOf(children, depths) {
  const rows = new Array(depths.length).fill(0), free = new Array(Math.max(...depths) + 1).fill(0);
  const pending = [0];
  while (pending.length) {
    const line = [pending.pop()];
    while (children[line.at(-1)].length) line.push(children[line.at(-1)][0]);
    const row = Math.max(...line.map(node => free[depths[node]]));
    for (const node of line) {
      rows[node] = row;
      free[depths[node]] = row + 1;
    }
    // Deepest branches are placed first, so that no edge crosses another.
    for (const node of line) pending.push(...children[node].slice(1).reverse());
  }
  return rows;
}
