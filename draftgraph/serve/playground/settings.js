// The switches: what a request is sent with. Empty fields are left to the mode's own defaults.

import { byId } from "./dom.js";

const SWITCHES = ["k", "tau", "theta_prob", "theta_sib", "max_nodes"];
const KEY = "draftgraph.key";

export class Settings {
  /** `modes`: the switches that each mode uses, {mode: {switch: {default, least, most}}}. */
  constructor(form, modes) {
    this.form = form;
    this.modes = modes;
    this.panel = byId("settings");
    this.toggle = byId("settings-toggle");
    const fields = form.elements;
    fields.key.value = sessionStorage.getItem(KEY) ?? "";
    fields.key.addEventListener("change", () => sessionStorage.setItem(KEY, this.key));
    this.toggle.addEventListener("click", () => this.open(this.panel.hidden));
    for (const choice of fields.mode) choice.addEventListener("change", () => this.followMode());
    this.followMode();
  }

  get key() {
    return this.form.elements.key.value.trim();
  }

  open(wanted = true) {
    this.panel.hidden = !wanted;
    this.toggle.setAttribute("aria-expanded", String(wanted));
  }

  askForKey() {
    this.open();
    this.form.elements.key.focus();
  }

  chooseMode(mode) {
    if (mode in this.modes) this.form.elements.mode.value = mode;
    this.followMode();
  }

  /** Switches that the mode does not use are disabled; the others show its defaults. */
  followMode() {
    const used = this.modes[this.form.elements.mode.value] ?? {};
    for (const name of SWITCHES) {
      const field = this.form.elements[name], { default: usual = "", least = "", most = null } = used[name] ?? {};
      field.disabled = !(name in used);
      field.placeholder = name in used ? usual : "–";
      field.min = least;
      field.max = most ?? "";
    }
  }

  /** The first field that cannot be sent as it is, or null; the browser says what is wrong with it. */
  firstInvalid() {
    const found = Array.from(this.form.elements).find(field => field.willValidate && !field.checkValidity()) ?? null;
    if (found) this.open();
    return found;
  }

  /** A request without its messages. Every request has a seed, so that it can be repeated. */
  request() {
    const fields = this.form.elements, graph = { mode: fields.mode.value, trace: true };
    for (const name of SWITCHES) {
      if (!fields[name].disabled && fields[name].value !== "") graph[name] = Number(fields[name].value);
    }
    return {
      temperature: Number(fields.temperature.value),
      seed: fields.seed.value === "" ? Math.floor(Math.random() * 2 ** 31) : Number(fields.seed.value),
      max_tokens: Number(fields.max_tokens.value || 256),
      stream: true,
      stream_options: { include_usage: true },
      draftgraph: graph,
    };
  }
}
