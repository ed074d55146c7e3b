// The few ways in which this page makes elements. Text is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = id => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  const { data = {}, ...rest } = properties;
  Object.assign(made, rest);
  Object.assign(made.dataset, data);
  made.append(...children);
  return made;
}

export function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A function that runs `draw` soon, and not more often than every `pause` milliseconds. */
export function throttled(draw, pause = 80) {
  let waiting = null, last = -Infinity;
  return () => {
    waiting ??= setTimeout(() => {
      waiting = null;
      last = performance.now();
      draw();
    }, Math.max(0, last + pause - performance.now()));
  };
}
