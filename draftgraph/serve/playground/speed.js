// How fast an answer came, and how fast the same answer comes by plain decoding.

import { firstDifference } from "./answer.js";
import { byId, element, throttled } from "./dom.js";
import { duration, rate } from "./text.js";

const SHORTEST = 0.1; // seconds: under it, what a browser measures is chance

export class Speed {
  constructor() {
    this.draw = throttled(() => this.show(), 150);
    this.answer = null;
    this.show();
  }

  look(answer) {
    this.answer = answer;
    this.show();
  }

  show() {
    const { answer } = this, plain = answer?.plain;
    byId("figures").replaceChildren(...figures(answer).flatMap(([name, value, unit]) => [
      element("div", {}, element("dt", { textContent: name }),
        element("dd", {}, value, ...(unit ? [element("small", { textContent: ` ${unit}` })] : []))),
    ]));
    byId("race").hidden = byId("plain-answer").hidden = !plain;
    byId("verdict").hidden = !plain?.finish;
    if (!plain) return;
    const fastest = Math.max(...[answer, plain].map(one => one.tokensPerSecond || 0), 1e-9);
    byId("race").replaceChildren(runner(answer, answer.mode, fastest), runner(plain, "plain", fastest));
    byId("plain-answer").querySelector(".prose").textContent = plain.text;
    if (plain.finish) byId("verdict").replaceChildren(...verdict(answer, plain));
  }
}

function figures(answer) {
  const known = answer?.tokens.length > 0;
  return [
    ["speed", known ? rate(answer.tokensPerSecond) : "–", "tokens/s"],
    ["per pass", known ? answer.tokensPerPass.toFixed(2) : "–", "tokens"],
    ["first token", known ? duration(answer.secondsToFirst) : "–", ""],
    ["total", known ? duration(answer.seconds) : "–", ""],
  ];
}

function runner(answer, name, fastest) {
  const bar = element("span", { className: `bar ${name}` });
  bar.style.width = `${(100 * (answer.tokensPerSecond || 0)) / fastest}%`;
  return element("div", { className: "runner" },
    element("span", { className: "name", textContent: name }), element("span", { className: "track" }, bar),
    element("span", { className: "value", textContent: `${rate(answer.tokensPerSecond)} tokens/s` }));
}

function verdict(answer, plain) {
  if (plain.finish === "stopped" || plain.finish === "error") return ["Plain decoding was stopped: nothing to compare."];
  return [...ratio(answer, plain), sameness(answer, plain)];
}

function ratio(answer, plain) {
  if (Math.min(answer.timed, plain.timed) < SHORTEST) return ["Too short to be timed."];
  const times = answer.tokensPerSecond / plain.tokensPerSecond;
  return [element("b", { className: times >= 1 ? "good" : "wrong", textContent: `${times.toFixed(2)}×` }), " plain decoding"];
}

function sameness(answer, plain) {
  const place = firstDifference(answer.text, plain.text);
  const said = place < 0 ? "✓ identical text" : `✗ texts differ from character ${place + 1} on`;
  return element("span", { className: `chip ${place < 0 ? "good" : "wrong"}`, textContent: said });
}
