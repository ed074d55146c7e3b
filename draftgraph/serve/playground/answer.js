// What is known of one answer: its tokens, its steps, and how fast they came. Knows nothing of the page.

export const SOURCES = {
  target: { name: "target", meaning: "the model's own token" },
  draft: { name: "draft", meaning: "drafted by the small model" },
  merged: { name: "merged", meaning: "shared with another path of the graph" },
  copied: { name: "copied", meaning: "copied from the text so far, or from an earlier answer" },
  recycled: { name: "recycled", meaning: "an earlier choice of the model, used again" },
};

export class Answer {
  constructor(request) {
    this.request = request;
    this.text = "";
    this.tokens = []; // {text, source, step}
    this.steps = []; // {nodes, merges, tokens, seconds, position}
    this.usage = null;
    this.finish = null; // the server's reason, or "stopped" or "error"
    this.plain = null; // the Answer to the same request by plain decoding
    this.sent = performance.now();
    this.first = this.last = null; // when tokens came
    this.firstTokens = 0;
  }

  get mode() {
    return this.request.draftgraph.mode;
  }

  /** Takes a chunk in; the tokens that it brought, as they are to be shown. */
  add(chunk) {
    const choice = chunk.choices?.[0], told = chunk.draftgraph;
    const content = choice?.delta?.content ?? "";
    this.text += content;
    this.usage = chunk.usage ?? this.usage;
    this.finish = choice?.finish_reason ?? this.finish;
    // A server that tells nothing of its tokens is shown as one that gives a token per chunk.
    const tokens = (told?.tokens ?? (content ? [{ text: content }] : []))
      .map(token => ({ ...token, source: SOURCES[token.source] ? token.source : "target", step: this.steps.length }));
    if (tokens.length) this.addStep({ nodes: [], merges: [], ...told?.step, tokens });
    const held = content.slice(tokens.map(token => token.text).join("").length); // text told after its token
    return held ? [...tokens, { text: held, source: "target", step: this.steps.length - 1 }] : tokens;
  }

  addStep(step) {
    this.steps.push(step);
    this.tokens.push(...step.tokens);
    this.last = performance.now();
    if (this.first === null) [this.first, this.firstTokens] = [this.last, step.tokens.length];
  }

  /** From the first tokens to the last, as it was seen here: the prompt's own time is left out. */
  get tokensPerSecond() {
    return this.timed > 0 ? (this.tokens.length - this.firstTokens) / this.timed : NaN;
  }

  get timed() {
    return (this.last - this.first) / 1000;
  }

  get tokensPerPass() {
    return this.tokens.length / this.steps.length;
  }

  get secondsToFirst() {
    return this.first === null ? NaN : (this.first - this.sent) / 1000;
  }

  get seconds() {
    return this.last === null ? NaN : (this.last - this.sent) / 1000;
  }

  countBySource() {
    const counts = Object.fromEntries(Object.keys(SOURCES).map(source => [source, 0]));
    for (const token of this.tokens) counts[token.source] += 1;
    return counts;
  }

  /** The same request for plain decoding, as long as this answer came. */
  plainRequest() {
    const whole = this.finish === "stop" || this.finish === "length";
    const length = whole ? {} : { max_tokens: this.tokens.length };
    return { ...this.request, ...length, draftgraph: { mode: "off", trace: true } };
  }
}

/** The place of the first character in which two texts differ, or -1. */
export function firstDifference(one, other) {
  if (one === other) return -1;
  let place = 0;
  while (one[place] === other[place]) place += 1;
  return place;
}
