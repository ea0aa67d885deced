"use strict";

const $ = (id) => document.getElementById(id);
const MOST_ROUNDS = 1000; // rounds that are shown; older ones make room
// Why drafting ended, in words of this page.
const STOPS = { policy: "stopped by the policy", max_draft: "longest draft", budget: "max tokens near", eos: "end of the text" };
const ORIGINS = { accepted: "drafted, and kept", corrected: "by the target, in place of a rejected token", bonus: "added by the target" };

let offered = null; // what the server told of itself
let key = ""; // never stored
let messages = []; // of the conversation, as the API takes them
let last = null; // the last question: what was asked, and what came
let running = null; // an AbortController while a text is written

function make(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function tellWrong(message) {
  $("wrong").textContent = message;
  $("wrong").hidden = !message;
}

async function ask(path, init = {}) {
  const headers = { ...(init.headers || {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...init, headers, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  if (answer.status === 401) {
    $("locked").hidden = false;
    $("key").focus();
  }
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // No document: its status says what there is to say.
  }
  throw new Error(message);
}

// What the server offers.

async function begin() {
  tellWrong("");
  try {
    offered = await (await ask("v1/specctl")).json();
  } catch (error) {
    tellWrong(error.message);
    return;
  }
  $("locked").hidden = true;
  $("model").textContent = offered.policy ? `${offered.model}, drafts stopped by ${offered.policy.label}` : `${offered.model}, without a draft`;
  document.title = `${offered.model} · specctl`;
  $("chat").checked = offered.chat;
  $("chat").disabled = !offered.chat_template;
  $("temperature").placeholder = String(offered.sampling.temperature);
  $("tokens").placeholder = String(offered.sampling.max_tokens);
  const choices = offered.policies.map((one) => new Option(one.id, one.id));
  const served = offered.policy ? `${offered.policy.label} (as served)` : "none";
  $("policy").replaceChildren(new Option(served, ""), ...choices);
  showSettings();
}

function showSettings() {
  const chosen = offered.policies.find((one) => one.id === $("policy").value);
  const fields = Object.entries(chosen ? chosen.settings : {}).filter(([, kind]) => ["number", "integer", "boolean"].includes(kind.type));
  $("settings").replaceChildren(...fields.map(([name, kind]) => settingField(name, kind)));
}

function settingField(name, kind) {
  const row = make("p");
  const field = make("input");
  field.id = `setting-${name}`;
  field.name = name;
  field.setAttribute("form", "asking");
  if (kind.type === "boolean") {
    field.type = "checkbox";
    field.checked = kind.default;
  } else {
    field.type = "number";
    field.step = kind.type === "integer" ? "1" : "any";
    for (const [bound, given] of [["min", kind.minimum ?? kind.exclusiveMinimum], ["max", kind.maximum ?? kind.exclusiveMaximum]]) {
      if (given !== undefined) field[bound] = given;
    }
    field.value = kind.default;
  }
  const label = make("label", "", name);
  label.htmlFor = field.id;
  row.append(label, " ", field);
  return row;
}

function policyText() {
  const name = $("policy").value;
  const values = [...$("settings").querySelectorAll("input")].filter((one) => one.type === "checkbox" || one.value !== "");
  return name + (values.length ? ":" : "") + values.map((one) => `${one.name}=${one.type === "checkbox" ? one.checked : one.value}`).join(",");
}

// A question and its answers.

function body(said) {
  const asked = { stream: true, stream_options: { include_usage: true }, seed: Number($("seed").value || drawnSeed()), specctl: { rounds: true } };
  if ($("temperature").value !== "") asked.temperature = Number($("temperature").value);
  if ($("tokens").value !== "") asked.max_tokens = Number($("tokens").value);
  if ($("policy").value) asked.specctl.policy = policyText();
  if ($("chat").checked) return { ...asked, messages: said };
  return { ...asked, prompt: said.length > 1 ? said.map((one) => `${one.content}\n`).join("") : said[0].content };
}

function drawnSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

async function send() {
  const question = $("question").value;
  if (running || !question.trim()) return;
  if (!offered) await begin();
  if (!offered || !$("asking").reportValidity()) return;
  const said = [...messages, { role: "user", content: question }];
  const turn = make("article");
  turn.append(make("h2", "", question), make("div", "columns"));
  $("conversation").append(turn);
  $("question").value = "";
  const asked = body(said);
  const found = await write(asked, turn, asked.specctl.policy || (offered.policy ? `With drafts, ${offered.policy.label}` : "The target alone"));
  if (found === null) {
    turn.remove();
    $("question").value = question;
    return;
  }
  messages = [...said, { role: "assistant", content: found.text }];
  last = { asked, turn, found };
  $("compare").disabled = !offered.policy;
}

async function compare() {
  if (running || !last) return;
  const { asked, turn, found } = last;
  const alone = await write({ ...asked, specctl: { rounds: true, draft: false } }, turn, "The target alone");
  if (alone === null) return;
  turn.querySelector(".verdict")?.remove();
  const verdict = make("p", "verdict", compared(found, alone, asked));
  turn.append(verdict);
  $("announced").textContent = verdict.textContent;
}

function compared(drafted, alone, asked) {
  const ratio = drafted.speed && alone.speed ? `, ${(drafted.speed / alone.speed).toFixed(2)} times as fast with drafts` : "";
  if (drafted.stopped || alone.stopped) return `One of them was stopped${ratio}.`;
  if (drafted.text === alone.text) return `The texts are equal${ratio}.`;
  const drawn = (asked.temperature ?? offered.sampling.temperature) > 0;
  return `The texts differ${ratio}.${drawn ? " Above temperature 0 both are drawn from the target's distribution, but not with the same draws." : ""}`;
}

async function write(asked, turn, title) {
  const column = new Column(title);
  const others = turn.querySelector(".columns");
  others.querySelector(`[data-title="${CSS.escape(title)}"]`)?.remove();
  others.append(column.whole);
  running = new AbortController();
  tellWrong("");
  working(true);
  try {
    const path = asked.messages ? "v1/chat/completions" : "v1/completions";
    const init = { method: "POST", body: JSON.stringify(asked), headers: { "Content-Type": "application/json" }, signal: running.signal };
    for await (const piece of events(await ask(path, init))) column.take(piece);
  } catch (error) {
    if (error.name === "AbortError") {
      column.stopped = true;
    } else {
      tellWrong(error.message);
      if (!column.text) {
        column.whole.remove();
        return null;
      }
      column.stopped = true;
    }
  } finally {
    running = null;
    working(false);
  }
  column.end();
  turn.scrollIntoView({ block: "nearest" });
  $("announced").textContent = column.text;
  return column;
}

function working(now) {
  for (const id of ["send", "clear"]) $(id).disabled = now;
  $("stop").disabled = !now;
  $("compare").disabled = now || !last || !offered?.policy;
  $("conversation").setAttribute("aria-busy", String(now));
}

async function* events(answer) {
  const decoder = new TextDecoder();
  const reader = answer.body.getReader();
  let waiting = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the answer ended before its text");
      waiting += decoder.decode(value, { stream: true });
      const lines = waiting.split("\n");
      waiting = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        if (line === "data: [DONE]") return;
        const piece = JSON.parse(line.slice(6));
        if (piece.error) throw new Error(piece.error.message);
        yield piece;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

class Column {
  constructor(title) {
    this.whole = make("section");
    this.whole.dataset.title = title;
    this.shown = make("p", "text");
    this.figures = make("p", "figures");
    this.figures.title = "Tokens by the time of the models' rounds, without the prompt and the network";
    this.rounds = make("ol", "rounds");
    this.rounds.tabIndex = 0; // so that keys scroll it
    this.rounds.hidden = true;
    this.rounds.setAttribute("aria-label", `Rounds: ${title}`);
    this.whole.append(make("h3", "", title), this.shown, this.figures, this.rounds);
    this.text = this.pending = "";
    this.waiting = []; // tokens whose text has not come
    this.count = this.tokens = this.drafted = this.accepted = this.ms = this.speed = 0;
    this.stopped = false;
  }

  take(piece) {
    const choice = piece.choices[0];
    const text = choice ? (choice.delta ? choice.delta.content : choice.text) || "" : "";
    this.text += text;
    this.pending += text;
    for (const round of piece.specctl?.rounds || []) this.add(round);
    this.colour();
    if (piece.usage) this.tokens = piece.usage.completion_tokens;
    this.summarise();
  }

  add(round) {
    this.count += 1;
    this.drafted += round.drafted;
    this.accepted += round.accepted;
    this.tokens += round.tokens.length;
    this.waiting.push(...round.tokens.map((one) => ({ ...one, round: this.count })));
    this.ms += round.draft_ms + round.verify_ms; // of the models: neither the network nor this page slows them
    this.speed = this.ms ? (this.tokens * 1000) / this.ms : 0;
    const line = make("li");
    const bar = make("span", "bar");
    const kept = make("span", "kept");
    bar.style.width = `${round.drafted * 0.6}rem`;
    kept.style.width = round.drafted ? `${(100 * round.accepted) / round.drafted}%` : "0";
    bar.append(kept);
    bar.setAttribute("aria-hidden", "true");
    line.append(make("span", "", String(this.count)), bar, make("span", "", round.drafted ? `${round.accepted} of ${round.drafted} accepted, ${STOPS[round.stop] || "ended"}` : "no draft"));
    this.rounds.append(line);
    this.rounds.hidden = !this.drafted;
    if (this.rounds.childElementCount > MOST_ROUNDS) this.rounds.firstElementChild.remove();
    this.rounds.scrollTop = this.rounds.scrollHeight;
  }

  // Tokens together are the text: one has none where a later one completes its character, and all may come before it.
  colour() {
    while (this.waiting.length && this.waiting[0].token.length <= this.pending.length) {
      const token = this.waiting.shift();
      this.span(token, token.token.length);
    }
  }

  span(token, length) {
    const made = make("span", token.origin, this.pending.slice(0, length));
    made.title = `${token.origin}, round ${token.round}: ${ORIGINS[token.origin]}`;
    this.shown.append(made);
    this.pending = this.pending.slice(length);
  }

  summarise() {
    const share = this.drafted ? `, ${((100 * this.accepted) / this.drafted).toFixed(0)}% of ${this.drafted} drafted tokens accepted` : "";
    this.figures.textContent = `${this.speed.toFixed(1)} tokens/s, ${this.tokens} tokens in ${this.count} rounds${share}`;
  }

  end() {
    this.shown.append(this.pending);
    this.pending = "";
    if (this.stopped) this.figures.textContent += ", stopped";
  }
}

$("asking").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("compare").addEventListener("click", compare);
$("policy").addEventListener("change", showSettings);
$("clear").addEventListener("click", () => {
  messages = [];
  last = null;
  $("conversation").replaceChildren();
  $("compare").disabled = true;
  $("question").focus();
});
$("unlock").addEventListener("click", () => {
  key = $("key").value;
  $("key").value = "";
  begin();
});
$("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  $("unlock").click();
});

begin();
