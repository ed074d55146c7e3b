// The page: sends what was asked, and hands what comes to the conversation, the steps and the speed.

import { Answer } from "./answer.js";
import { fetchModel, fetchReady, streamCompletion } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Settings } from "./settings.js";
import { Speed } from "./speed.js";
import { Steps } from "./steps.js";
import { counted, rate } from "./text.js";

const modes = await fetch("playground/modes.json").then(response => response.json());
const prompt = byId("prompt"), send = byId("send"), stop = byId("stop"), compare = byId("compare");
const settings = new Settings(byId("composer"), modes);
const speed = new Speed();
const chat = new Chat(look);
const steps = new Steps((answer, step) => chat.mark(answer, step), (answer, step) => chat.reveal(answer, step));
let running = null; // an AbortController while an answer comes
let model = "";

function look(answer, step) {
  steps.look(answer, step);
  speed.look(answer);
  showBusy();
}

function showBusy() {
  const busy = running !== null, focused = document.activeElement;
  send.hidden = busy;
  stop.hidden = !busy;
  if (busy && focused === send) stop.focus();
  if (!busy && focused === stop) prompt.focus();
  compare.disabled = busy || !canCompare(speed.answer);
  document.body.classList.toggle("busy", busy);
}

function canCompare(answer) {
  return answer?.tokens.length > 0 && answer.mode !== "off" && answer.finish !== "error";
}

function showError(message) {
  byId("error").textContent = message;
  byId("error").hidden = !message;
}

function announce(text) {
  byId("status").textContent = text;
}

/** Streams an answer in; how it ended is left in it. */
async function receive(answer, came) {
  running = new AbortController();
  showBusy();
  try {
    for await (const chunk of streamCompletion(answer.request, settings.key, running.signal)) came(answer.add(chunk));
    answer.finish ??= "stop";
  } catch (error) {
    const stopped = error.name === "AbortError";
    answer.finish = stopped ? "stopped" : "error";
    if (!stopped) showError(error.message);
    if (error.status === 401) settings.askForKey();
  } finally {
    running = null;
  }
}

async function ask(text) {
  if (!text || (!model && !(await findModel())) || running) return;
  const invalid = settings.firstInvalid();
  if (invalid) return invalid.reportValidity();
  showError("");
  announce("The answer is coming.");
  const messages = [...chat.history(), { role: "user", content: text }];
  const answer = new Answer({ model, messages, ...settings.request() });
  chat.begin(text, answer);
  prompt.value = "";
  look(answer);
  await receive(answer, tokens => {
    chat.add(answer, tokens);
    steps.grown(answer);
    speed.draw();
  });
  if (!chat.has(answer)) return showBusy(); // a new chat was begun
  if (answer.tokens.length || answer.finish !== "error") {
    chat.end(answer);
    steps.show();
    speed.show();
  } else {
    prompt.value = chat.takeBack();
    lookBack();
  }
  showBusy();
  announce(answer.finish === "error" ? "" : answer.text);
  if (byId("always-compare").checked && canCompare(answer)) await comparePlain(answer);
}

function lookBack() {
  const last = chat.turns.at(-1)?.answer ?? null;
  if (last) return look(last);
  steps.clear();
  speed.look(null);
}

async function comparePlain(answer) {
  showError("");
  answer.plain = new Answer(answer.plainRequest());
  await receive(answer.plain, () => speed.draw());
  speed.show();
  showBusy();
  announce(`Plain decoding: ${rate(answer.plain.tokensPerSecond)} tokens per second. ${byId("verdict").textContent}`);
}

async function findModel() {
  try {
    model = byId("model").textContent = (await fetchModel(settings.key)).id;
    const { device, dtype, mode } = await fetchReady(settings.key);
    byId("model").textContent = [model, device, dtype].filter(Boolean).join(" · ");
    settings.chooseMode(mode);
    showError("");
  } catch (error) {
    showError(error.status === 401 ? "This server asks for an API key: type it into the settings." : error.message);
    if (error.status === 401) settings.open();
  }
  return model;
}

byId("composer").addEventListener("submit", event => {
  event.preventDefault();
  ask(prompt.value.trim());
});
byId("composer").noValidate = true; // checked in `ask`, which opens the settings first
byId("composer").elements.key.addEventListener("change", findModel);
prompt.addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask(prompt.value.trim());
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") running?.abort();
});
stop.addEventListener("click", () => running?.abort());
compare.addEventListener("click", () => comparePlain(speed.answer));
byId("new-chat").addEventListener("click", () => {
  running?.abort();
  chat.clear();
  steps.clear();
  speed.look(null);
  showError("");
  showBusy();
  prompt.focus();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => ask(example.textContent.trim()));
}
showBusy();
await findModel();
document.body.dataset.ready = "true"; // for tests
