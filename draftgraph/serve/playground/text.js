// Tokens and numbers as text that can be shown anywhere; the same marks as draftgraph/inspect/text.py.

const MARKS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\u007f": "␡" };
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}\p{Zs}]/u;
const segmenter = new Intl.Segmenter();

/** The text with whitespace and controls as symbols. */
export function visible(text) {
  return Array.from(segmenter.segment(text), ({ segment }) =>
    Array.from(segment).length > 1 && !/\s/.test(segment) ? segment : Array.from(segment, mark).join("")).join("");
}

function mark(character) {
  if (MARKS[character]) return MARKS[character];
  const code = character.codePointAt(0);
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return INVISIBLE.test(character) ? "\\u" + code.toString(16).padStart(4, "0") : character;
}

/** A token's short visible name; a token without text of its own is named by its id. */
export function label(text, token, longest = 16) {
  const name = visible(text ?? "") || `‹${token}›`;
  const parts = Array.from(segmenter.segment(name), ({ segment }) => segment);
  return parts.length <= longest ? name : parts.slice(0, longest - 1).join("") + "…";
}

/** Two digits, as short as they can be told: ".83", "1", "<.01". */
export function probability(value) {
  if (typeof value !== "number") return "";
  if (value >= 0.995) return "1";
  return value >= 0.005 ? value.toFixed(2).slice(1) : "<.01";
}

export function rate(tokensPerSecond) {
  if (!Number.isFinite(tokensPerSecond)) return "–";
  return tokensPerSecond.toFixed(tokensPerSecond < 100 ? 1 : 0);
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  return seconds < 0.9995 ? `${(1000 * seconds).toPrecision(seconds < 0.01 ? 2 : 3)} ms` : `${seconds.toFixed(2)} s`;
}

export function counted(number, thing, things = `${thing}s`) {
  return `${number} ${number === 1 ? thing : things}`;
}
