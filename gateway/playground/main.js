// The page: the form, its runs, and what they share.

import { apiKey, stream, useApiKey } from "./api.js";
import { Chart } from "./chart.js";
import { loadRecording, replay } from "./replay.js";
import { Run } from "./run.js";
import { Services } from "./services.js";

const MAX_RUNS = 4;
const element = (id) => document.getElementById(id);
const form = element("form");
const chart = new Chart(element("chart"));
const services = new Services(element("services"), element("announcer"), { changed: showServices, failed: showFailure });
const runs = [];
const messages = [];
let stopper = null;
let offered = { methods: [], most: 4 };
let recording = null;

function addRun(chosen = {}) {
  const number = [0, 1, 2, 3].find((each) => !runs.some((run) => run.colour === each));
  if (number === undefined) return;
  const run = new Run(element("run-template"), number, { remove: removeRun });
  run.offer(offered.methods, offered.most);
  run.choose(chosen);
  runs.push(run);
  element("runs").append(run.element);
  updateButtons();
}

function removeRun(run) {
  if (stopper || runs.length === 1) return;
  runs.splice(runs.indexOf(run), 1);
  run.element.remove();
  chart.show(runs);
  element("add").disabled = false;
  element("add").focus();
  updateButtons();
}

function updateButtons() {
  const isRunning = stopper !== null;
  element("generate").disabled = isRunning;
  element("stop").disabled = !isRunning;
  element("add").disabled = isRunning || runs.length === MAX_RUNS || recording !== null;
  element("clear").disabled = isRunning || recording !== null;
  for (const run of runs) run.element.querySelector(".remove").disabled = isRunning || runs.length === 1 || recording !== null;
}

// Path and body of the request, without what a run chooses.
function requestOf() {
  const fields = new FormData(form);
  const number = (name) => (fields.get(name) === "" ? undefined : Number(fields.get(name)));
  const count = number("alternatives") ?? 0;
  const body = {
    max_tokens: number("max_tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    return_token_metrics: true,
  };
  const prompt = fields.get("prompt");
  if (fields.get("mode") === "completion") return ["v1/completions", { ...body, prompt, logprobs: count }];
  const asked = [...messages, { role: "user", content: prompt }];
  return ["v1/chat/completions", { ...body, messages: asked, logprobs: true, top_logprobs: count }];
}

async function generate() {
  if (stopper) return;
  stopper = new AbortController();
  updateButtons();
  const { signal } = stopper;
  const [path, body] = recording ? [] : requestOf();
  const source = (run, number) =>
    recording ? replay(recording.runs[number].events, signal) : stream(path, { ...body, ...run.options }, signal);
  const play = (run, number) => run.play(source(run, number), () => chart.draw()).catch(() => undefined);
  for (const run of runs) run.clear();
  chart.show(runs);
  if (form.elements.one_by_one.checked) {
    for (const [number, run] of runs.entries()) if (!signal.aborted) await play(run, number);
  } else {
    await Promise.all(runs.map(play));
  }
  for (const run of runs) run.compareWith(runs[0]);
  if (body?.messages && runs[0].isDone) {
    messages.splice(0, messages.length, ...body.messages, { role: "assistant", content: runs[0].text });
    element("prompt").value = "";
    showConversation();
  }
  stopper = null;
  updateButtons();
  summarize();
}

function summarize() {
  const done = runs.filter((run) => run.isDone && run.rate !== null);
  const told = done.map((run) => {
    const length = run.metrics?.num_spec_steps ? `, acceptance length ${run.metrics.mean_acceptance_length.toFixed(2)}` : "";
    return `${run.name}: ${run.rate.toFixed(0)} tokens/s${length}`;
  });
  chart.describe(told.length ? told.join("; ") : "No run is complete.");
  element("announcer").textContent = told.length ? `Done. ${told.join("; ")}` : "Stopped.";
}

function showConversation() {
  const items = messages.map(({ role, content }) => {
    const item = document.createElement("li");
    item.dataset.role = role;
    item.textContent = `${role}: ${content}`;
    return item;
  });
  element("conversation").replaceChildren(...items);
  element("conversation").hidden = !items.length || form.elements.mode.value !== "chat";
}

function showServices(answer) {
  element("model").textContent = answer.model;
  offered = { methods: answer.methods ?? [], most: answer.num_speculative_tokens };
  for (const run of runs) run.offer(offered.methods, offered.most);
}

function showFailure(error) {
  if (error.status === 401 && !element("access").open && document.activeElement === document.body) {
    element("access").open = true;
    element("key").focus();
  }
}

async function startReplay() {
  recording = await loadRecording();
  element("banner").textContent = recording.about;
  element("banner").hidden = false;
  form.elements.prompt.value = recording.request.prompt;
  for (const each of form.elements) if (!["generate", "stop"].includes(each.id)) each.disabled = true;
  services.show(recording.services);
  for (const chosen of recording.runs) addRun(chosen);
  for (const run of runs) run.method.disabled = run.k.disabled = run.rule.disabled = true;
  element("access").hidden = true;
  await generate();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
element("stop").addEventListener("click", () => stopper?.abort());
element("add").addEventListener("click", () => addRun());
element("clear").addEventListener("click", () => {
  messages.length = 0;
  showConversation();
  element("prompt").focus();
});
for (const choice of form.elements.mode) choice.addEventListener("change", showConversation);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  else if (event.key === "Escape") stopper?.abort();
});
element("key").value = apiKey();
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useApiKey(element("key").value.trim());
  element("access").open = false;
  services.ask();
});

if (new URLSearchParams(location.search).has("replay")) {
  startReplay();
} else {
  addRun();
  services.watch();
}
