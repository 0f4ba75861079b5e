"use strict";
// Samples are shown as text, never as markup: every string is inserted through textContent.

const PAGE = 25;
const groups = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("filters");
const list = document.getElementById("groups");
const more = document.getElementById("more");
const reward = (sample) => sample.reward ?? 0;
const shown = (value) => (value === null || value === undefined ? "–" : String(value));
let matching = [];
let drawn = 0;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function fact(parent, name, value, className) {
  const made = element("span", "", `${name} `);
  made.append(element("b", className, shown(value)));
  parent.append(made);
}

function number(text) {
  return text.trim() === "" ? null : Number(text);
}

function sampleFilter(wanted) {
  const low = number(wanted.low), high = number(wanted.high);
  return (sample) =>
    (wanted.step === "" || sample.step === Number(wanted.step)) &&
    (low === null || reward(sample) >= low) &&
    (high === null || reward(sample) <= high) &&
    (wanted.finish === "" || sample.end === wanted.finish);
}

function allText(sample) {
  if (!sample.turns) return sample.completion;
  return sample.turns.flatMap((turn) => [turn.text, ...turn.messages.map((m) => m.content)]).join("\n");
}

function matches(group, wanted) {
  if (wanted.kind !== "" && group.kind !== wanted.kind) return null;
  const name = wanted.prompt.trim().toLowerCase();
  const isNamed = group.name.toLowerCase().includes(name);
  const text = wanted.text.toLowerCase();
  const inPrompt = `${group.prompt}\n${group.answer ?? ""}`.toLowerCase().includes(text);
  const fits = sampleFilter(wanted);
  const samples = group.samples.filter(
    (s) => fits(s) && (isNamed || s.uid.toLowerCase() === name) && (inPrompt || allText(s).toLowerCase().includes(text))
  );
  return samples.length ? { ...group, samples } : null;
}

function mean(values) {
  return values.reduce((total, value) => total + value, 0) / values.length;
}

function variance(values) {
  const centre = mean(values);
  return mean(values.map((value) => (value - centre) ** 2));
}

const ORDERS = {
  spread: (group) => -variance(group.samples.map(reward)),
  low: (group) => Math.min(...group.samples.map(reward)),
  long: (group) => -Math.max(...group.samples.map((s) => s.tokens ?? 0)),
};

function drawMessage(className, role, text) {
  const made = element("div", `message ${className}`);
  const facts = element("div", "facts", role);
  made.append(facts, element("pre", "", text));
  return { made, facts };
}

function drawTurns(sample) {
  return sample.turns.flatMap((turn, i) => {
    const { made, facts } = drawMessage("written", `turn ${i + 1}`, turn.text);
    fact(facts, "tokens", turn.end - turn.start);
    if (turn.reward) fact(facts, "reward", turn.reward);
    if (turn.advantage !== null) fact(facts, "advantage", turn.advantage);
    for (const [name, value] of Object.entries(turn.metrics)) fact(facts, name, value);
    return [made, ...turn.messages.map((m) => drawMessage("observed", m.role, m.content).made)];
  });
}

// Equal samples of a step are drawn once, with their number.
function drawEqualSamples(samples) {
  const equal = Map.groupBy(samples, (s) => JSON.stringify({ ...s, uid: null }));
  return [...equal.values()].map((same) => drawSample(same[0], same.length));
}

function drawSample(sample, count) {
  const isGood = (sample.advantage ?? reward(sample) - 0.5) > 0;
  const made = element("div", sample.advantage === 0 ? "sample" : `sample ${isGood ? "good" : "bad"}`);
  const facts = element("div", "facts");
  const link = element("a", "", `step ${sample.step}`);
  link.href = `#${new URLSearchParams({ step: sample.step, prompt: sample.uid })}`;
  facts.append(link);
  if (count > 1) fact(facts, "samples", count);
  fact(facts, "reward", sample.reward);
  for (const [name, value] of Object.entries(sample.rewards)) fact(facts, name, value);
  if (sample.advantage !== null) fact(facts, "advantage", sample.advantage);
  fact(facts, "tokens", sample.tokens);
  fact(facts, "finish", sample.finish, sample.end === "truncated" ? "cut" : "");
  if (sample.turns) {
    fact(facts, "turns", sample.turns.length);
    fact(facts, "ended by", sample.episode_end);
    for (const [name, value] of Object.entries(sample.scores)) fact(facts, `score ${name}`, value);
  }
  made.append(facts, ...(sample.turns ? drawTurns(sample) : [element("pre", "", sample.completion)]));
  return made;
}

function drawGroup(group) {
  const made = element("section", "group");
  const steps = [...new Set(group.samples.map((s) => s.step))];
  const facts = element("div", "facts");
  fact(facts, group.kind, group.name);
  fact(facts, steps.length > 1 ? "steps" : "step", steps.join(", "));
  fact(facts, "samples", group.samples.length);
  fact(facts, "mean reward", Number(mean(group.samples.map(reward)).toFixed(4)));
  fact(facts, "gold answer", group.answer);
  made.append(facts, element("pre", "", group.prompt), ...drawEqualSamples(group.samples));
  return made;
}

function drawMore() {
  const next = matching.slice(drawn, drawn + PAGE);
  list.append(...next.map(drawGroup));
  drawn += next.length;
  more.hidden = drawn >= matching.length;
}

function update() {
  const wanted = Object.fromEntries(new FormData(form));
  matching = groups.map((group) => matches(group, wanted)).filter((group) => group !== null);
  const order = ORDERS[wanted.order];
  if (order) matching.sort((a, b) => order(a) - order(b));
  const samples = matching.reduce((total, group) => total + group.samples.length, 0);
  document.getElementById("count").textContent = `${samples} samples of ${matching.length} prompts`;
  list.replaceChildren();
  drawn = 0;
  drawMore();
}

function fillChoices() {
  const steps = [...new Set(groups.flatMap((group) => group.samples.map((s) => s.step)))].sort((a, b) => a - b);
  form.elements.step.append(...steps.map((step) => new Option(String(step), String(step))));
  const names = [...new Set(groups.map((group) => group.name))];
  document.getElementById("names").append(...names.map((name) => new Option(name, name)));
}

// The address names a step and a prompt or sample, so that one can be linked to.
function readAddress() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (name in form.elements) form.elements[name].value = value;
  }
  update();
}

fillChoices();
window.addEventListener("hashchange", readAddress);
form.addEventListener("input", update);
form.addEventListener("submit", (event) => event.preventDefault());
more.addEventListener("click", drawMore);
readAddress();
