// The picture of a step: the token tree that the model checked, with the accepted path and with links between
// nodes that are one node of the graph. The classes are those of draftgraph/inspect/theme.py.

import { shape } from "./dom.js";
import { GUTTER, HEIGHT, layered } from "./layout.js";
import { label, probability, visible } from "./text.js";

const PADDING = 9, GAP = 7, MARGIN = 3;
const SHRINK = 0.8; // as far as it can still be read
const SQUARE = 3; // corners of copied nodes; others are round
const FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const pen = document.createElement("canvas").getContext("2d");

function widthOf(text, font) {
  pen.font = `${font} ${FONT}`;
  return pen.measureText(text).width;
}

/** An SVG element for a step {nodes, merges, tokens}. */
export function drawStep(step, title) {
  const items = itemsOf(step);
  const boxes = layered(items, items.map(item => item.width));
  const order = items.map((_, place) => place).sort((one, other) => items[one].accepted - items[other].accepted);
  const edges = order.filter(place => items[place].parent >= 0)
    .map(place => edge(boxes[items[place].parent], boxes[place], items[place]));
  const links = step.merges.map(([one, other]) => link(boxes, items, one, other));
  const shapes = items.map((item, place) => node(item, boxes[place], place));
  const reach = step.merges.length ? GUTTER * 0.8 : 0;
  const width = Math.max(...boxes.map(box => box.right)) + reach + 2 * MARGIN;
  const height = Math.max(...boxes.map(box => box.middle)) + HEIGHT / 2 + 2 * MARGIN;
  const svg = shape("svg", {
    class: "dg graph", role: "img", "aria-label": title, width, height,
    viewBox: `${-MARGIN} ${-MARGIN} ${width} ${height}`,
  }, ...edges, ...links, ...shapes);
  svg.style.minWidth = `${Math.round(SHRINK * width)}px`;
  light(svg, items, step.merges);
  return svg;
}

/** What is drawn for each node, and for the model's own token at the end of the accepted path. */
function itemsOf(step) {
  const first = new Map(step.merges.map(([one, other]) => [Math.max(one, other), Math.min(one, other)]));
  const shared = new Set(first.values());
  const items = step.nodes.map((node, place) => {
    const details = node.parent < 0 ? [] : [probability(node.score)];
    if (first.has(place)) details.push(`↪${first.get(place)}`);
    else if (shared.has(place)) details.push(`#${place}`);
    const root = node.parent < 0, status = root ? "" : node.accepted ? "accepted" : "rejected";
    const tip = [
      `${place} ${visible(node.text ?? "")}`, `token ${node.token}`, root ? "end of the text" : node.source,
      ...(root ? [] : [`chance ${node.score?.toFixed(3) ?? "unknown"}`, status]),
      ...(first.has(place) ? [`the same node of the graph as ${first.get(place)}`] : []),
    ].join(", ");
    return item(node.parent, node.source, status, label(node.text, node.token), details.join(" "), tip);
  });
  const bonus = step.tokens.at(-1);
  if (bonus?.source === "target" && items.length) {
    const end = items.findLastIndex(({ status, source }) => status === "accepted" || source === "root");
    const tip = `${visible(bonus.text)}, token ${bonus.id}, the model's own choice`;
    items.push(item(end, "bonus", "accepted", `★ ${label(bonus.text, bonus.id)}`, "", tip));
  }
  return items;
}

function item(parent, source, status, name, details, tip) {
  const accepted = status === "accepted";
  const nameWidth = widthOf(name, `${accepted ? "700" : "400"} 13px`);
  const width = 2 * PADDING + nameWidth + (details ? GAP + widthOf(details, "10.5px") : 0);
  return { parent, source, status, accepted, name, nameWidth, details, tip, width };
}

function node({ source, status, name, nameWidth, details, tip }, box, place) {
  const outline = shape("rect", {
    class: "pill", x: box.left, y: box.middle - HEIGHT / 2, width: box.width, height: HEIGHT,
    rx: source === "copied" ? SQUARE : HEIGHT / 2,
  });
  const writing = [text(box.left + PADDING, box.middle, name, "token")];
  if (details) writing.push(text(box.left + PADDING + nameWidth + GAP, box.middle, details, "small"));
  const kind = source === "bonus" ? "" : "node";
  return shape("g", { class: `${kind} ${source} ${status}`.trim(), "data-id": place },
    shape("title", {}, tip), outline, ...writing);
}

function text(x, y, content, kind) {
  return shape("text", { x, y, class: kind, "dominant-baseline": "central" }, content);
}

function edge(start, end, { source, status }) {
  const bend = GUTTER / 2;
  const turn = `C${start.columnRight + bend} ${start.middle} ${end.left - bend} ${end.middle} ${end.left} ${end.middle}`;
  return shape("path", {
    class: `edge ${source} ${status}`, d: `M${start.right} ${start.middle}H${start.columnRight}${turn}`,
  });
}

/** A dashed curve between two nodes that are one; fainter where it only follows from a link before it. */
function link(boxes, items, one, other) {
  const [upper, lower] = boxes[one].middle <= boxes[other].middle ? [boxes[one], boxes[other]] : [boxes[other], boxes[one]];
  const x = box => box.right - Math.min(box.width / 2, 14);
  const start = upper.middle + HEIGHT / 2, end = lower.middle - HEIGHT / 2, halfway = (start + end) / 2;
  const side = Math.abs(x(upper) - x(lower)) < 24 ? 18 : 0;
  const bend = `C${x(upper) + side} ${halfway} ${x(lower) + side} ${halfway} ${x(lower)} ${end}`;
  const follows = items[one].source !== "merged" && items[other].source !== "merged";
  return shape("path", {
    class: `edge link merged${follows ? " follows" : ""}`, d: `M${x(upper)} ${start}${bend}`, "data-link": `${one} ${other}`,
  });
}

/** Pointing at a node lights up its path, and the nodes that are one with it. */
function light(svg, items, merges) {
  const shapes = Array.from(svg.querySelectorAll("g"));
  const show = lit => {
    svg.classList.toggle("lighting", lit.size > 0);
    shapes.forEach((one, place) => one.classList.toggle("lit", lit.has(place)));
  };
  svg.addEventListener("pointerover", event => {
    const place = shapes.indexOf(event.target.closest("g"));
    const lit = new Set(merges.filter(pair => pair.includes(place)).flat());
    for (let at = place; at >= 0; at = items[at].parent) lit.add(at);
    show(lit);
  });
  svg.addEventListener("pointerleave", () => show(new Set()));
}
