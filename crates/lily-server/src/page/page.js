// The chat page. What the model and the server say is untrusted: it becomes text and never markup, so there is no
// innerHTML here, and the policy that comes with the page forbids it.

const byId = (id) => document.getElementById(id);
const composer = byId("composer");
const input = byId("message");

/** The conversation as the API takes it, without the system message. */
const messages = [];
/** What stops the answer that is on its way. */
let running = null;
/** Counts conversations: what an earlier one still says is not heard. */
let conversation = 0;

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const button = (text, className, onclick) =>
  element("button", { type: "button", textContent: text, className, onclick });

/** Tells people who do not see the page. Answers are told when they are complete: each token would be noise. */
function announce(text) {
  byId("status").textContent = text;
}

// Settings

const numbers = ["temperature", "top_p", "top_k", "max_completion_tokens", "seed"];
const remembered = [...numbers, "system", "tools", "thinking"].map(byId);

function loadSettings() {
  let saved = {};
  try {
    saved = JSON.parse(localStorage.getItem("lily-settings")) ?? {};
  } catch {
    // Storage may be forbidden, or hold something else: the page works without.
  }
  for (const field of remembered) {
    if (typeof saved[field.id] === "boolean") field.checked = saved[field.id];
    else if (typeof saved[field.id] === "string") field.value = saved[field.id];
  }
}

function saveSettings() {
  const settings = remembered.map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value]);
  try {
    localStorage.setItem("lily-settings", JSON.stringify(Object.fromEntries(settings)));
  } catch {
    // As above.
  }
}

/** The declared tools; null where what is typed is none, and the field says so. */
function checkTools() {
  const field = byId("tools");
  let tools = [];
  let wrong = "";
  try {
    tools = field.value.trim() ? JSON.parse(field.value) : [];
    if (!Array.isArray(tools)) wrong = "Tools must be a JSON array.";
  } catch (error) {
    wrong = `The tools are not JSON: ${error.message}`;
  }
  byId("tools-error").textContent = wrong;
  field.ariaInvalid = String(wrong !== "");
  return wrong ? null : tools;
}

/** The declared tools for a request; where they are wrong, their field is where the reader lands. */
function readTools() {
  const tools = checkTools();
  if (!tools) {
    showSettings(true);
    byId("tools").focus();
  }
  return tools;
}

function showSettings(shown) {
  byId("settings").hidden = !shown;
  byId("settings-button").ariaExpanded = String(shown);
  if (shown) document.documentElement.scrollTop = 0;
}

function request(tools) {
  const system = byId("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    chat_template_kwargs: { enable_thinking: byId("thinking").checked },
  };
  for (const name of numbers) {
    const value = byId(name).valueAsNumber;
    if (!Number.isNaN(value)) body[name] = value;
  }
  if (tools.length) body.tools = tools;
  return body;
}

// The server

class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers() {
  const key = sessionStorage.getItem("lily-key");
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

/** The response to a request, or what the server has against it. */
async function send(path, options) {
  const response = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refused(said?.error?.message ?? `The server answered ${response.status}.`, response.status);
}

/** The data of each event of a stream. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}

/** Adds what a chunk brings to the message. */
function take(message, delta) {
  message.content += delta.content ?? "";
  const thought = delta.reasoning_content;
  if (thought) message.reasoning_content = (message.reasoning_content ?? "") + thought;
  for (const part of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[part.index] ??= {
      id: "", type: "function", function: { name: "", arguments: "" },
    });
    call.id += part.id ?? "";
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
}

async function showModel() {
  try {
    const { data } = await (await send("v1/models")).json();
    const [{ id, context_length: length }] = data;
    byId("model").textContent = length ? `${id}, up to ${length} tokens` : id;
  } catch (error) {
    if (error.status === 401) askForKey(() => {});
    else byId("model").textContent = "The server does not answer.";
  }
}

function askForKey(then) {
  const form = byId("key-form");
  form.hidden = false;
  byId("key").focus();
  form.onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem("lily-key", byId("key").value);
    byId("key").value = "";
    form.hidden = true;
    input.focus();
    showModel();
    then();
  };
}

// Markdown: as much of it as chats have, made of nodes.

function inline(text) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(/`([^`\n]+)`|\*\*(?=\S)([^\n]*?\S)\*\*/g)) {
    nodes.push(text.slice(from, found.index));
    const [all, code, bold] = found;
    nodes.push(element(code ? "code" : "strong", { textContent: code ?? bold }));
    from = found.index + all.length;
  }
  return [...nodes, text.slice(from)];
}

/** Cuts a text into blocks: {kind, lines, label}. */
function blocks(text) {
  const found = [];
  let fence = null;
  for (const line of text.split("\n")) {
    const last = found.at(-1);
    const [, ticks, label] = line.match(/^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/) ?? [];
    const [, bullet, item] = line.match(/^\s{0,6}([-*+]|\d{1,9}[.)])\s+(.*)$/) ?? [];
    if (fence !== null) {
      if (ticks?.startsWith(fence) && !label.trim()) fence = null;
      else last.lines.push(line);
    } else if (ticks) {
      fence = ticks;
      found.push({ kind: "code", lines: [], label: label.trim() });
    } else if (!line.trim()) {
      found.push({ kind: "gap", lines: [] });
    } else if (/^#{1,6}\s/.test(line)) {
      found.push({ kind: "heading", lines: [line.replace(/^#+\s+/, "")] });
    } else if (bullet) {
      const kind = /\d/.test(bullet) ? "ol" : "ul";
      if (last?.kind === kind) last.lines.push(item);
      else found.push({ kind, lines: [item], label: bullet });
    } else if (last?.kind === "paragraph") {
      last.lines.push(line);
    } else {
      found.push({ kind: "paragraph", lines: [line] });
    }
  }
  return found.filter(({ kind }) => kind !== "gap");
}

function block({ kind, lines, label }) {
  const text = lines.join("\n");
  if (kind === "paragraph") return element("p", {}, ...inline(text));
  if (kind === "heading") return element("h3", {}, ...inline(text));
  if (kind === "code") {
    // A wide block scrolls, so the keyboard has to get there.
    const code = element("pre", { tabIndex: 0, role: "group", ariaLabel: "Code" }, element("code", { textContent: text }));
    return element("figure", {}, element("figcaption", {}, label || "code", copyButton("Copy code", () => text)), code);
  }
  const list = element(kind, {}, ...lines.map((line) => element("li", {}, ...inline(line))));
  if (kind === "ol") list.start = parseInt(label, 10);
  return list;
}

/** Shows a text, and leaves alone the blocks that stayed as they were: a selection in them lives on. */
function showMarkdown(parent, text) {
  parent.shown ??= [];
  const wanted = blocks(text);
  const keys = wanted.map((one) => JSON.stringify(one));
  let same = 0;
  while (same < keys.length && keys[same] === parent.shown[same]) same += 1;
  while (parent.children.length > same) parent.lastChild.remove();
  parent.append(...wanted.slice(same).map(block));
  parent.shown = keys;
}

function copyButton(label, text) {
  return button(label, "copy", async ({ target }) => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      // Browsers keep the clipboard from pages at plain addresses of the network.
      const field = element("textarea", { value: text() });
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
      target.focus();
    }
    target.textContent = "Copied";
    announce("Copied");
    setTimeout(() => (target.textContent = label), 1500);
  });
}

// Turns

/** Adds to the page's end, and follows it there where the reader was there. */
function following(change) {
  const page = document.documentElement;
  const atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 80;
  change();
  if (atEnd) page.scrollTop = page.scrollHeight;
}

function addTurn(who, label, ...children) {
  const turn = element("article", { className: who, ariaLabel: label }, ...children);
  byId("empty").hidden = true;
  byId("conversation").append(turn);
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
  return turn;
}

/** Takes back a turn and all behind it. */
function rewind(turn, length) {
  while (turn.nextSibling) turn.nextSibling.remove();
  turn.remove();
  messages.length = length;
  byId("empty").hidden = messages.length > 0;
}

function addQuestion(text) {
  const start = messages.length;
  messages.push({ role: "user", content: text });
  const edit = button("Edit", "", () => {
    rewind(turn, start);
    input.value = text;
    input.focus();
  });
  const turn = addTurn("user", "You", element("p", { textContent: text }), element("div", { className: "edit actions" }, edit));
}

/** A call with its arguments as they come, and the place for its result. */
function callView() {
  const name = element("strong");
  const parameters = element("p", { className: "code" });
  const result = element("textarea", { rows: 1, className: "code", spellcheck: false });
  const label = element("label", { className: "results", hidden: true }, "Result", result);
  const view = element("div", { className: "call" }, element("p", {}, "Calls ", name), parameters, label);
  const show = (call) => {
    name.textContent = call.function.name;
    parameters.textContent = call.function.arguments;
    result.ariaLabel = `Result of ${call.function.name}`;
  };
  return { view, show, label, result };
}

/** An answer on the page. */
class AnswerView {
  calls = [];

  constructor(retry, copy) {
    this.thought = element("p");
    this.details = element("details", { open: true, hidden: true }, element("summary", { textContent: "Thinking" }), this.thought);
    this.content = element("div", { className: "content" });
    this.callList = element("div");
    this.stats = element("p", { className: "stats" });
    this.error = element("p", { className: "error", role: "alert" });
    this.actions = element("div", { className: "actions", hidden: true },
      copyButton("Copy", copy), button("Retry", "retry", retry));
    this.turn = addTurn("assistant writing", "Lily",
      this.details, this.content, this.callList, this.error, this.stats, this.actions);
  }

  show(message) {
    const thought = message.reasoning_content?.trim() ?? "";
    if (this.thought.textContent !== thought) this.thought.textContent = thought;
    this.details.hidden = !thought;
    showMarkdown(this.content, message.content);
    (message.tool_calls ?? []).forEach((call, index) => {
      if (!this.calls[index]) {
        this.calls[index] = callView();
        this.callList.append(this.calls[index].view);
      }
      this.calls[index].show(call);
    });
  }

  showProgress({ total, cached = 0, processed = 0 }) {
    const done = Math.max(cached, processed);
    this.bar ??= element("progress", { ariaLabel: "Reading the prompt" });
    this.bar.max = total;
    this.bar.value = done;
    const kept = cached ? ` (${cached} from cache)` : "";
    this.stats.replaceChildren(`Reading the prompt: ${done} of ${total} tokens${kept}`, this.bar);
  }
}

function statistics({ asked, first, last, pieces, usage }) {
  const said = [];
  const tokens = usage?.completion_tokens ?? pieces;
  if (first) {
    said.push(`${usage ? "" : "about "}${tokens} tokens`);
    const seconds = (last - first) / 1000;
    // A tool call comes in few pieces, when most of it is there already: they do not tell how fast it was written.
    if (pieces > tokens / 2 && seconds > 0) said.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    said.push(`first after ${((first - asked) / 1000).toFixed(2)} s`);
  }
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    said.push(`prompt ${usage.prompt_tokens} tokens, ${cached} of them cached`);
  }
  return said.join(" · ");
}

/** Asks for the next answer, and shows it as it comes. */
async function answer(tools) {
  const start = messages.length;
  const current = conversation;
  const controller = new AbortController();
  const message = { role: "assistant", content: "" };
  const view = new AnswerView(() => {
    const again = readTools();
    if (!again) return;
    rewind(view.turn, start);
    input.focus();
    answer(again);
  }, () => message.content);
  const times = { asked: performance.now(), pieces: 0 };
  let frame = 0;
  let reason = null;
  let problem = null;
  setRunning(controller);
  announce("Waiting for the answer");

  const draw = () => following(() => {
    frame = 0;
    view.show(message);
    if (times.first && !reason) view.stats.textContent = statistics(times);
  });

  try {
    const body = JSON.stringify(request(tools));
    const response = await send("v1/chat/completions", { method: "POST", body, signal: controller.signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(chunk.error.message);
      times.usage = chunk.usage ?? times.usage;
      if (chunk.prompt_progress && !times.first) view.showProgress(chunk.prompt_progress);
      const choice = chunk.choices?.[0];
      reason = choice?.finish_reason ?? reason;
      const delta = choice?.delta ?? {};
      if (!delta.content && !delta.reasoning_content && !delta.tool_calls) continue;
      take(message, delta);
      times.pieces += 1;
      times.last = performance.now();
      times.first ??= times.last;
      frame ||= requestAnimationFrame(draw);
    }
    if (!reason) problem = new Refused("The answer broke off: the connection was lost.");
  } catch (error) {
    problem = error;
  }
  cancelAnimationFrame(frame);
  if (current !== conversation) return;
  // A reader that left half-way would keep the server at work.
  controller.abort();
  reason ??= "broken";
  draw();
  finish(view, message, { reason, problem, times, stopped: problem?.name === "AbortError" });
}

/** The end of an answer, however it came. */
function finish(view, message, { reason, problem, times, stopped }) {
  setRunning(null);
  // A call that was cut short cannot be sent back to the model.
  if (reason !== "tool_calls") delete message.tool_calls;
  const hasPart = message.content || message.reasoning_content || message.tool_calls;
  if (hasPart) messages.push(message);
  following(() => {
    view.turn.classList.remove("writing");
    view.actions.hidden = false;
    if (message.content || message.tool_calls) view.details.open = false;
    const ending = { length: " · cut at the limit" }[reason] ?? (stopped ? " · stopped" : "");
    view.stats.textContent = (statistics(times) + ending).replace(/^ · /, "");
    if (problem && !stopped) {
      view.error.textContent = problem.status || problem instanceof Refused ? problem.message : "The server does not answer.";
    }
    if (message.tool_calls) takeResults(view, message);
  });
  if (stopped) announce("Stopped");
  else if (problem) {
    // The alert speaks for itself.
    announce("");
    if (problem.status === 401) askForKey(() => view.actions.querySelector(".retry").click());
  } else announce(message.tool_calls ? "The model waits for a tool's result" : `Answer complete: ${message.content}`);
}

/** Lets the reader play the tools: what is typed becomes their results. */
function takeResults(view, message) {
  const send = () => {
    if (running) return;
    const tools = readTools();
    if (!tools) return;
    message.tool_calls.forEach(({ id }, index) => {
      const { label, result } = view.calls[index];
      messages.push({ role: "tool", tool_call_id: id, content: result.value });
      label.replaceWith(element("p", { className: "code", textContent: `→ ${result.value}` }));
    });
    row.remove();
    input.focus();
    answer(tools);
  };
  const row = element("div", { className: "results actions" }, button("Send results", "", send));
  for (const { label, result } of view.calls) {
    label.hidden = false;
    result.onkeydown = (event) => onEnter(event, send);
  }
  view.callList.append(row);
  // Only from an empty composer: nobody's typing is to land elsewhere.
  if (document.activeElement === input && !input.value) view.calls[0].result.focus();
}

// The composer

/** One button sends and stops, so that the focus stays where it is. */
function setRunning(controller) {
  running = controller;
  document.body.toggleAttribute("data-busy", controller !== null);
  byId("send").textContent = controller ? "Stop" : "Send";
}

function onEnter(event, then) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  then();
}

function submit() {
  const text = input.value.trim();
  if (running || !text) return;
  const tools = readTools();
  if (!tools) return;
  input.value = "";
  addQuestion(text);
  answer(tools);
}

input.onkeydown = (event) => onEnter(event, submit);
composer.onsubmit = (event) => {
  event.preventDefault();
  if (running) running.abort();
  else submit();
  input.focus();
};
document.onkeydown = (event) => {
  if (event.key === "Escape") running?.abort();
};
byId("new-chat").onclick = () => {
  conversation += 1;
  running?.abort();
  setRunning(null);
  messages.length = 0;
  byId("conversation").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
  announce("New chat");
  input.focus();
};
byId("settings-button").onclick = () => showSettings(byId("settings").hidden);
for (const field of remembered) field.onchange = saveSettings;
byId("tools").onblur = checkTools;

loadSettings();
showModel();
