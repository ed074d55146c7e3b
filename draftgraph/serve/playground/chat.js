// The conversation: messages as they were said, answers token by token in the colours of their sources.

import { SOURCES } from "./answer.js";
import { byId, element } from "./dom.js";
import { counted } from "./text.js";

const NEAR = 60; // pixels from the end within which the view follows the answer

export class Chat {
  /** `choose(answer, step)` is called when a token is clicked. */
  constructor(choose) {
    this.view = byId("conversation");
    this.welcome = byId("welcome");
    this.turns = []; // {prompt, answer, said, shown, note}
    this.view.addEventListener("click", event => {
      const token = event.target.closest(".token"), turn = this.turns.find(({ shown }) => shown.contains(token));
      if (token && turn) choose(turn.answer, Number(token.dataset.step));
    });
  }

  /** What the next request begins with. */
  history() {
    return this.turns.flatMap(({ prompt, answer }) => [
      { role: "user", content: prompt },
      { role: "assistant", content: answer.text },
    ]);
  }

  /** A question and an answer that is about to come. */
  begin(prompt, answer) {
    this.welcome.hidden = true;
    const said = element("div", { className: "message user" }, element("p", { className: "prose", dir: "auto", textContent: prompt }));
    const shown = element("p", { className: "prose answer", dir: "auto" });
    const note = element("p", { className: "note quiet", textContent: "…" });
    const reply = element("div", { className: "message assistant" }, shown, note);
    this.turns.push({ prompt, answer, said, reply, shown, note });
    this.view.append(said, reply);
    this.view.scrollTop = this.view.scrollHeight;
  }

  get atEnd() {
    return this.view.scrollHeight - this.view.scrollTop - this.view.clientHeight < NEAR;
  }

  has(answer) {
    return this.turns.some(turn => turn.answer === answer);
  }

  add(answer, tokens) {
    const { shown } = this.turns.find(turn => turn.answer === answer), follows = this.atEnd;
    shown.append(...tokens.filter(token => token.text).map(tokenElement));
    if (follows) this.view.scrollTop = this.view.scrollHeight;
  }

  end(answer) {
    const { note } = this.turns.find(turn => turn.answer === answer);
    const ends = { length: "reached max tokens", stopped: "stopped", error: "broken off" };
    const { temperature, seed } = answer.request;
    note.textContent = [
      answer.mode, `${counted(answer.tokens.length, "token")} in ${counted(answer.steps.length, "pass", "passes")}`,
      ...(temperature > 0 ? [`temperature ${temperature}, seed ${seed}`] : []),
      ...(ends[answer.finish] ? [ends[answer.finish]] : []),
    ].join(" · ");
    if (this.atEnd) this.view.scrollTop = this.view.scrollHeight;
  }

  /** Takes the last question back: it was not answered at all. */
  takeBack() {
    const { prompt, said, reply } = this.turns.pop();
    said.remove();
    reply.remove();
    this.welcome.hidden = this.turns.length > 0;
    return prompt;
  }

  clear() {
    for (const { said, reply } of this.turns.splice(0)) {
      said.remove();
      reply.remove();
    }
    this.welcome.hidden = false;
  }

  /** Marks the tokens of a step of an answer. */
  mark(answer, step) {
    for (const token of this.view.querySelectorAll(".token.now")) token.classList.remove("now");
    for (const token of this.tokensOf(answer, step)) token.classList.add("now");
  }

  /** Scrolls to the tokens of a step, in the conversation only: the page itself stays where it is. */
  reveal(answer, step) {
    const token = this.tokensOf(answer, step)[0]?.getBoundingClientRect(), view = this.view.getBoundingClientRect();
    if (!token || (token.top >= view.top && token.bottom <= view.bottom)) return;
    this.view.scrollTop += token.top - view.top - view.height / 3;
  }

  tokensOf(answer, step) {
    const turn = this.turns.find(turn => turn.answer === answer);
    return turn?.shown.querySelectorAll(`[data-step="${step}"]`) ?? [];
  }
}

/** A token whose ink is coloured, but not the space around it: that may hang at the end of a line. */
function tokenElement({ text, source, step }) {
  const [, before, ink, after] = text.match(/^(\s*)(.*?)(\s*)$/s);
  return element("span", {
    className: "token", title: `step ${step + 1}: ${source}, ${SOURCES[source].meaning}`, data: { step, source },
  }, before, ...(ink ? [element("span", { className: `ink is-${source}`, textContent: ink })] : []), after);
}
