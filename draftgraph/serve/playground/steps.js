// The steps of an answer: a bar for each, a slider through them, and the graph of the one that is looked at.

import { SOURCES } from "./answer.js";
import { byId, element, throttled } from "./dom.js";
import { EXAMPLE } from "./example.js";
import { drawStep } from "./graph.js";
import { counted, duration, visible } from "./text.js";
import { Timeline } from "./timeline.js";

export class Steps {
  /** `looked(answer, step)` is called whenever a step is shown, `reveal(answer, step)` when it was asked for. */
  constructor(looked, reveal) {
    this.looked = looked;
    this.reveal = reveal;
    this.slider = byId("slider");
    this.timeline = new Timeline(byId("timeline"), step => this.go(step));
    this.picture = byId("picture");
    this.draw = throttled(() => this.show());
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    byId("previous").addEventListener("click", () => this.go(this.step - 1));
    byId("next").addEventListener("click", () => this.go(this.step + 1));
    document.addEventListener("keydown", event => this.key(event));
    window.addEventListener("resize", this.draw);
    this.clear();
  }

  clear() {
    this.answer = null;
    this.step = 0;
    this.show();
  }

  /** Looks at an answer, at its newest step unless told otherwise. */
  look(answer, step = Infinity) {
    this.answer = answer;
    this.go(step);
  }

  go(step) {
    if (!this.answer) return;
    this.step = Math.max(0, Math.min(this.answer.steps.length - 1, step));
    this.show();
    this.reveal(this.answer, this.step);
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
    this.allow("previous", step && this.step > 0);
    this.allow("next", step && this.step < steps.length - 1);
    byId("step-number").value = step ? `step ${this.step + 1} of ${steps.length}` : "";
    const words = step ? explain(step) : this.answer ? "" : `An example. ${explain(EXAMPLE)}`;
    byId("explanation").textContent = words;
    this.slider.setAttribute("aria-valuetext", step ? `Step ${this.step + 1} of ${steps.length}. ${words}` : "no step yet");
    this.showLegend();
    this.timeline.show(steps, this.step);
    this.showPicture(step ?? (this.answer ? null : EXAMPLE), words);
    this.looked(this.answer, this.step);
  }

  /** A button with the focus hands it to the slider before it is disabled. */
  allow(id, possible) {
    if (!possible && document.activeElement === byId(id)) this.slider.focus();
    byId(id).disabled = !possible;
  }

  showPicture(step, words) {
    this.picture.classList.toggle("example", !this.answer);
    this.picture.replaceChildren(...(step?.nodes.length ? [drawStep(step, `Graph. ${words}`)] : []));
  }

  showLegend() {
    const counts = this.answer?.countBySource() ?? {};
    byId("legend").replaceChildren(...Object.entries(SOURCES).map(([source, { name, meaning }]) => element(
      "li", { title: meaning, data: { source } },
      element("span", { className: `ink is-${source}`, textContent: name }),
      ...(this.answer ? [element("b", { textContent: counts[source] })] : []),
    )));
  }
}

/** What happened in a step, in words. */
function explain(step) {
  const drafted = step.nodes.length - 1, own = step.tokens.at(-1)?.source === "target";
  const accepted = step.tokens.length - (own ? 1 : 0), time = step.seconds ? `, in ${duration(step.seconds)}` : "";
  const gained = `“${visible(step.tokens.map(token => token.text).join("")).replaceAll("␣", " ").trim()}”`;
  if (drafted < 0) return `The model gave ${gained}; this step was not traced.`;
  if (drafted === 0) return `Nothing was drafted: the model gave ${gained} in a pass of its own${time}.`;
  const checked = `${counted(drafted, "drafted token")} checked in one pass`;
  const kept = accepted ? `${accepted} accepted` : "none accepted";
  return `${checked}, ${kept}${own ? ", and the model's own ★" : ""}: ${gained}${time}.`;
}
