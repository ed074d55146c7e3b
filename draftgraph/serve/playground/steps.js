// The steps of an answer: a bar for each, a slider through them, and the graph of the one that is looked at.

import { SOURCES } from "./answer.js";
import { byId, element, shape, throttled } from "./dom.js";
import { drawStep } from "./graph.js";
import { counted, duration, visible } from "./text.js";

const LEAST_BARS = 24; // so that the first bars are not as wide as the page

export class Steps {
  /** `looked(answer, step)` is called whenever another step is looked at. */
  constructor(looked) {
    this.looked = looked;
    this.slider = byId("slider");
    this.timeline = byId("timeline");
    this.picture = byId("picture");
    this.hint = byId("explanation").textContent;
    this.draw = throttled(() => this.show());
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    byId("previous").addEventListener("click", () => this.go(this.step - 1));
    byId("next").addEventListener("click", () => this.go(this.step + 1));
    document.addEventListener("keydown", event => this.key(event));
    this.clear();
  }

  clear() {
    this.answer = null;
    this.step = this.bars = 0;
    this.timeline.replaceChildren();
    this.show();
  }

  /** Looks at an answer, at its newest step unless told otherwise. */
  look(answer, step = Infinity) {
    if (answer !== this.answer) {
      this.answer = answer;
      this.bars = 0;
      this.timeline.replaceChildren();
    }
    this.go(step);
  }

  go(step) {
    if (!this.answer) return;
    this.step = Math.max(0, Math.min(this.answer.steps.length - 1, step));
    this.show();
  }

  /** A step has come: it is looked at, unless the reader went back to another. */
  grown(answer) {
    if (answer !== this.answer) return;
    if (this.step >= answer.steps.length - 2) this.step = answer.steps.length - 1;
    this.draw();
  }

  key(event) {
    const change = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!change || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.target.closest("input, textarea, select")) return;
    const scrolls = event.target === this.picture && this.picture.scrollWidth > this.picture.clientWidth;
    if (scrolls) return; // arrows scroll there
    event.preventDefault();
    this.go(this.step + change);
  }

  show() {
    const steps = this.answer?.steps ?? [], step = steps[this.step];
    this.slider.max = Math.max(0, steps.length - 1);
    this.slider.value = this.step;
    this.slider.disabled = steps.length < 2;
    byId("previous").disabled = !step || this.step === 0;
    byId("next").disabled = !step || this.step === steps.length - 1;
    byId("step-number").value = step ? `step ${this.step + 1} of ${steps.length}` : "";
    const words = step ? explain(step) : this.hint;
    byId("explanation").textContent = words;
    this.slider.setAttribute("aria-valuetext", step ? `Step ${this.step + 1} of ${steps.length}. ${words}` : "no step yet");
    this.showLegend();
    this.showBars(steps);
    this.picture.replaceChildren(...(step?.nodes.length ? [drawStep(step, `Graph of step ${this.step + 1}. ${words}`)] : []));
    this.looked(this.answer, this.step);
  }

  showLegend() {
    const counts = this.answer?.countBySource() ?? {};
    const entries = Object.entries(SOURCES).filter(([source]) => source !== "past" || counts.past);
    byId("legend").replaceChildren(...entries.map(([source, { name, meaning }]) => element(
      "li", { title: meaning, data: { source } },
      element("span", { className: `token is-${source}`, textContent: name }),
      ...(this.answer ? [element("b", { textContent: counts[source] })] : []),
    )));
  }

  showBars(steps) {
    for (; this.bars < steps.length; this.bars += 1) {
      const place = this.bars;
      const bar = shape("g", { "data-step": place }, ...steps[place].tokens.map((token, level) => shape("rect", {
        class: `is-${token.source}`, x: place + 0.08, width: 0.84, y: -level - 1, height: 0.88,
      })));
      bar.addEventListener("click", () => this.go(place));
      this.timeline.append(bar);
    }
    const highest = Math.max(6, ...steps.map(step => step.tokens.length));
    this.timeline.setAttribute("viewBox", `0 ${-highest} ${Math.max(LEAST_BARS, steps.length)} ${highest}`);
    for (const bar of this.timeline.querySelectorAll(".now")) bar.classList.remove("now");
    this.timeline.children[this.step]?.classList.add("now");
  }
}

/** What happened in a step, in words. */
function explain(step) {
  const drafted = step.nodes.length - 1, own = step.tokens.at(-1)?.source === "target";
  const accepted = step.tokens.length - (own ? 1 : 0), time = step.seconds ? `, in ${duration(step.seconds)}` : "";
  const gained = `“${visible(step.tokens.map(token => token.text).join(""))}”`;
  if (drafted < 0) return `The model gave ${gained}; this step was not traced.`;
  if (drafted === 0) return `Nothing was drafted: the model gave ${gained} in a pass of its own${time}.`;
  const checked = `${counted(drafted, "drafted token")} checked in one pass`;
  const kept = accepted ? `${accepted} accepted` : "none accepted";
  return `${checked}, ${kept}${own ? ", and the model's own ★" : ""}: ${gained}${time}.`;
}
