// A bar for each step of an answer, as high as the tokens that it gained, over the slider's own places.

import { SOURCES } from "./answer.js";
import { shape } from "./dom.js";

const THUMB = 16; // pixels: the slider's ends are half of it away from its edges
const WIDEST = 18, GAP = 1, FEWEST_LEVELS = 6;

export class Timeline {
  /** `choose(step)` is called when a bar is clicked; the slider is the keyboard's way to do the same. */
  constructor(svg, choose) {
    this.svg = svg;
    this.steps = [];
    svg.addEventListener("click", event => {
      const { unit, left } = this.places();
      choose(Math.round((event.clientX - svg.getBoundingClientRect().left - left) / unit));
    });
  }

  places() {
    const between = Math.max(1, this.steps.length - 1);
    return { unit: (this.svg.clientWidth - THUMB) / between, left: THUMB / 2 };
  }

  show(steps, current) {
    this.steps = steps;
    this.svg.toggleAttribute("hidden", !steps.length);
    const { clientWidth, clientHeight } = this.svg, { unit, left } = this.places();
    const width = Math.min(WIDEST, Math.max(1, unit - Math.min(2, unit / 4)));
    const level = clientHeight / Math.max(FEWEST_LEVELS, ...steps.map(step => step.tokens.length));
    const outlines = {};
    steps.forEach(({ tokens }, step) => tokens.forEach(({ source }, height) => {
      const x = left + step * unit - width / 2, y = clientHeight - (height + 1) * level + GAP;
      const kind = `is-${source}${step === current ? " now" : ""}`;
      outlines[kind] = `${outlines[kind] ?? ""}M${x} ${y}h${width}v${level - GAP}h${-width}z`;
    }));
    this.svg.setAttribute("viewBox", `0 0 ${clientWidth} ${clientHeight}`);
    this.svg.replaceChildren(...Object.entries(outlines).map(([kind, d]) => shape("path", { class: kind, d })));
    this.svg.dataset.steps = steps.length;
  }
}
