// How fast an answer came, and how fast the same answer comes by plain decoding.

import { firstDifference } from "./answer.js";
import { byId, element, throttled } from "./dom.js";
import { duration, rate } from "./text.js";

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
  const ratio = answer.tokensPerSecond / plain.tokensPerSecond, place = firstDifference(answer.text, plain.text);
  const told = [];
  if (Number.isFinite(ratio)) {
    told.push(element("b", { className: ratio >= 1 ? "good" : "wrong", textContent: `${ratio.toFixed(2)}×` }), " plain decoding");
  }
  const same = place < 0 ? "✓ identical text" : `✗ texts differ from character ${place + 1} on`;
  told.push(element("span", { className: `chip ${place < 0 ? "good" : "wrong"}`, textContent: same }));
  return told;
}
