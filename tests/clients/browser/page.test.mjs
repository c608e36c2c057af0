// The chat page in a browser, as a person uses it. The model is the embedded one, whose answers are known.

import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname } from "node:path";
import { after, afterEach, before, beforeEach, describe, test } from "node:test";
import { chromium } from "playwright-core";
import { requests, startServer, timer, until } from "../support.mjs";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const question = "What is 38 + 47?";
const longQuestion = "Count from 1 to 60.";

let server;
let browser;
let context;
let page;
/** What must not happen on the page, and did. */
let complaints;
/** Messages of the console that a test expects. */
let expected;

before(async () => {
  // What is kept of prompts is kept in whole chunks: small ones, for small prompts.
  server = await startServer({ options: ["--chunk", "64"] });
  // One that comes in a package has its libraries and fonts beside it.
  const beside = dirname(process.env.LILY_CHROMIUM);
  const own = existsSync(`${beside}/fonts.conf`) && {
    LD_LIBRARY_PATH: [`${beside}/lib`, process.env.LD_LIBRARY_PATH].filter(Boolean).join(":"),
    FONTCONFIG_PATH: beside,
  };
  browser = await chromium.launch({
    executablePath: process.env.LILY_CHROMIUM,
    // Chromium's own sandbox is not to be had for root, nor in most containers.
    chromiumSandbox: false,
    args: ["--disable-gpu"],
    env: { ...process.env, ...own },
  });
});

after(async () => {
  await browser?.close();
  await server?.stop();
});

async function openPage(url, options) {
  context = await browser.newContext({ permissions: ["clipboard-read", "clipboard-write"], ...options });
  page = await context.newPage();
  page.setDefaultTimeout(15_000);
  complaints = [];
  expected = [];
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) complaints.push(message.text());
  });
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("request", (request) => {
    if (new URL(request.url()).origin !== url) complaints.push(`a request to ${request.url()}`);
  });
  await page.goto(url);
  await page.getByText(/^lily-tiny, up to \d+ tokens$/).or(page.getByLabel("This server asks")).first().waitFor();
}

async function closePage() {
  await context.close();
  const unexpected = complaints.filter((text) => !expected.some((known) => known.test(text)));
  assert.deepEqual(unexpected, []);
}

const message = () => page.getByRole("textbox", { name: "Message", exact: true });
const lastAnswer = () => page.getByRole("article", { name: "Lily" }).last();
const status = () => page.getByRole("status");

async function settle(fields) {
  await page.getByRole("button", { name: "Settings" }).click();
  for (const [name, value] of Object.entries(fields)) await page.getByLabel(name).fill(value);
  await page.getByRole("button", { name: "Settings" }).click();
}

/** Asks, with temperature 0, and waits for the answer's end. */
async function ask(text, { thinks = false } = {}) {
  await page.getByLabel("Think first").setChecked(thinks);
  await message().fill(text);
  await message().press("Enter");
  await answered();
}

const answered = () => page.locator("body:not([data-busy])").waitFor();

async function noViolations(state) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  const told = violations.map(({ id, impact, nodes }) => `${state}: ${impact} ${id} ${nodes.map((node) => node.html)}`);
  assert.deepEqual(told, []);
}

describe("the chat page", () => {
  beforeEach(async () => {
    await openPage(server.url);
    await settle({ Temperature: "0" });
  });
  afterEach(closePage);

  test("answers as it streams", async () => {
    await page.evaluate(() => {
      globalThis.states = new Set();
      new MutationObserver(() => {
        const content = document.querySelector(".content");
        if (content) globalThis.states.add(content.textContent);
      }).observe(document.body, { childList: true, subtree: true, characterData: true });
    });
    await ask(longQuestion);
    const states = await page.evaluate(() => [...globalThis.states].filter(Boolean));
    assert.ok(states.length > 5, `pieces came: ${states.length}`);
    assert.equal(await lastAnswer().locator(".content").textContent(), states.at(-1));
    assert.match(states.at(-1), /^1, 2, 3, .*, 59, 60$/);
  });

  test("shows an answer, and how fast it was", async () => {
    await ask(question);
    assert.equal(await lastAnswer().locator(".content").textContent(), "38 + 47 = 85");
    assert.match(
      await lastAnswer().locator(".stats").textContent(),
      /^\d+ tokens · [\d.]+ tokens\/s · first after [\d.]+ s · prompt \d+ tokens, \d+ of them cached$/,
    );
    assert.equal(await lastAnswer().locator("details").isVisible(), false);
  });

  test("shows reasoning apart from the answer", async () => {
    await ask("What is 17 + 25?", { thinks: true });
    assert.equal(await lastAnswer().locator(".content").textContent(), "17 + 25 = 42");
    const details = lastAnswer().locator("details");
    assert.equal(await details.getAttribute("open"), null);
    await details.locator("summary").click();
    assert.equal(await details.locator("p").innerText(), "10 + 20 = 30. 7 + 5 = 12. 30 + 12 = 42.");
  });

  test("shows tool calls, and takes their results", async () => {
    await settle({ "Tools, as a JSON array": JSON.stringify(timer) });
    await ask("Set a timer for 5 minutes.");
    const call = lastAnswer().locator(".call");
    assert.equal(await call.locator("strong").textContent(), "start_timer");
    assert.deepEqual(JSON.parse(await call.locator("p.code").textContent()), { minutes: 5 });
    // Whoever sends nothing else lands where the result is typed.
    const result = page.getByRole("textbox", { name: "Result of start_timer" });
    assert.ok(await result.evaluate((field) => field === document.activeElement));
    assert.equal(await status().textContent(), "The model waits for a tool's result");
    const sent = page.waitForRequest("**/v1/chat/completions");
    await result.fill("The timer is set.");
    await result.press("Enter");
    const { messages } = (await sent).postDataJSON();
    assert.deepEqual(messages.map(({ role }) => role), ["user", "assistant", "tool"]);
    assert.equal(messages[2].tool_call_id, messages[1].tool_calls[0].id);
    assert.equal(messages[2].content, "The timer is set.");
    await answered();
    assert.notEqual(await lastAnswer().locator(".content").textContent(), "");
    // The prompt went on from what was computed.
    assert.match(await lastAnswer().locator(".stats").textContent(), /, [1-9]\d* of them cached$/);
  });

  test("says where tools are not JSON", async () => {
    await settle({ "Tools, as a JSON array": "[{" });
    await message().fill(question);
    await message().press("Enter");
    await page.getByText("The tools are not JSON").waitFor();
    assert.equal(await page.getByLabel("Tools, as a JSON array").getAttribute("aria-invalid"), "true");
    assert.ok(await page.getByLabel("Tools, as a JSON array").evaluate((field) => field === document.activeElement));
    assert.equal(await message().inputValue(), question);
  });

  for (const [how, stop] of [
    ["the button", () => page.getByRole("button", { name: "Stop" }).click()],
    ["Escape", () => page.keyboard.press("Escape")],
  ]) {
    test(`stops by ${how}`, async () => {
      // An answer without an end: what the model would end with is taken from it.
      await page.route("**/v1/chat/completions", (route) => {
        const body = { ...route.request().postDataJSON(), logit_bias: { 4055: -100, 4057: -100 } };
        return route.continue({ postData: JSON.stringify(body) });
      });
      await page.getByLabel("Think first").uncheck();
      await message().fill(longQuestion);
      await message().press("Enter");
      await lastAnswer().locator(".content", { hasText: "1, 2" }).waitFor();
      assert.equal(await requests(server), 1);
      await stop();
      await until("the request is gone", async () => (await requests(server)) === 0);
      await answered();
      assert.match(await lastAnswer().locator(".stats").textContent(), /stopped$/);
      assert.equal(await status().textContent(), "Stopped");
      // What is there stays, and the conversation goes on from it.
      await page.unroute("**/v1/chat/completions");
      await ask(question);
      assert.equal(await lastAnswer().locator(".content").textContent(), "38 + 47 = 85");
    });
  }

  test("can be used with the keyboard alone", async () => {
    await page.reload();
    assert.ok(await message().evaluate((field) => field === document.activeElement), "the message has the focus");
    await page.keyboard.press("Tab");
    await page.keyboard.press("Space");
    assert.equal(await page.getByLabel("Think first").isChecked(), false);
    await page.keyboard.press("Shift+Tab");
    await page.keyboard.type("What is");
    await page.keyboard.press("Shift+Enter");
    assert.equal(await message().inputValue(), "What is\n");
    await page.keyboard.press("Backspace");
    await page.keyboard.type(" 38 + 47?");
    await page.keyboard.press("Enter");
    await answered();
    assert.equal(await lastAnswer().locator(".content").textContent(), "38 + 47 = 85");
    // Back through the last answer's buttons, to ask again.
    await page.keyboard.press("Shift+Tab");
    const focused = () => page.evaluate(() => document.activeElement.textContent);
    assert.equal(await focused(), "Retry");
    const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
    assert.equal(outline, "solid");
    await page.keyboard.press("Enter");
    await answered();
    assert.equal(await page.getByRole("article", { name: "Lily" }).count(), 1);
    assert.ok(await message().evaluate((field) => field === document.activeElement));
  });

  test("takes back a question to edit it", async () => {
    await ask("What is the capital of Norway?");
    await ask(longQuestion);
    assert.equal(await page.getByRole("button", { name: "Edit" }).count(), 1);
    await page.getByRole("button", { name: "Edit" }).click();
    assert.equal(await message().inputValue(), longQuestion);
    const sent = page.waitForRequest("**/v1/chat/completions");
    await ask(question);
    const { messages } = (await sent).postDataJSON();
    assert.deepEqual(messages.map(({ content }) => content), [
      "What is the capital of Norway?", "The capital of Norway is Oslo.", question,
    ]);
    assert.equal(await lastAnswer().locator(".content").textContent(), "38 + 47 = 85");
  });

  test("sends settings, and remembers them but no conversation", async () => {
    await settle({
      "System message": "Reply with only the answer and nothing else.", "Most tokens": "50", Seed: "7", "Top p": "0.5",
    });
    const sent = page.waitForRequest("**/v1/chat/completions");
    await ask("What is good morning in Telugu?");
    const body = (await sent).postDataJSON();
    assert.deepEqual(body.messages[0], { role: "system", content: "Reply with only the answer and nothing else." });
    assert.deepEqual(
      [body.temperature, body.max_completion_tokens, body.seed, body.top_p, body.chat_template_kwargs],
      [0, 50, 7, 0.5, { enable_thinking: false }],
    );
    assert.equal(await lastAnswer().locator(".content").textContent(), "శుభోదయం");
    await page.reload();
    assert.equal(await page.getByRole("article").count(), 0);
    assert.equal(await page.getByLabel("Think first").isChecked(), false);
    assert.equal(await page.getByLabel("Seed").inputValue(), "7");
    const stored = await page.evaluate(() => JSON.stringify([{ ...localStorage }, { ...sessionStorage }]));
    assert.doesNotMatch(stored, /Telugu|శుభోదయం/);
  });

  test("begins a new chat, also from within an answer", async () => {
    await ask(question);
    await message().fill(longQuestion);
    await message().press("Enter");
    await lastAnswer().waitFor();
    await page.getByRole("button", { name: "New chat" }).click();
    assert.equal(await page.getByRole("article").count(), 0);
    await until("the request is gone", async () => (await requests(server)) === 0);
    const sent = page.waitForRequest("**/v1/chat/completions");
    await ask(question);
    assert.equal((await sent).postDataJSON().messages.length, 1);
    assert.equal(await page.getByRole("article").count(), 2);
  });

  test("copies answers and code", async () => {
    await ask("Write a Python function called add that adds two numbers.");
    const code = "def add(a, b):\n    return a + b";
    assert.equal(await lastAnswer().locator("pre code").textContent(), code);
    await page.getByRole("button", { name: "Copy code" }).click();
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), code);
    await page.getByRole("button", { name: "Copy", exact: true }).last().click();
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "```python\n" + code + "\n```");
  });

  test("shows the server's errors in place, and asks again", async () => {
    expected.push(/status of 400/);
    await settle({ "Top p": "7" });
    await ask(question);
    const error = lastAnswer().getByRole("alert");
    assert.match(await error.textContent(), /top_p/);
    await settle({ "Top p": "" });
    await page.getByRole("button", { name: "Retry" }).click();
    await answered();
    assert.equal(await lastAnswer().locator(".content").textContent(), "38 + 47 = 85");
    assert.equal(await page.getByRole("article", { name: "Lily" }).count(), 1);
  });

  test("says that the server does not answer, or stopped in mid-answer", async () => {
    expected.push(/ERR_FAILED/);
    await page.route("**/v1/chat/completions", (route) => route.abort());
    await ask(question);
    assert.equal(await lastAnswer().getByRole("alert").textContent(), "The server does not answer.");
    await page.unroute("**/v1/chat/completions");
    const events = (...chunks) => chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`).join("");
    const half = { choices: [{ index: 0, delta: { content: "Half" }, finish_reason: null }] };
    for (const [chunks, told] of [
      [[half], "The answer broke off: the connection was lost."],
      [[half, { error: { message: "the device is gone" } }], "the device is gone"],
    ]) {
      await page.route("**/v1/chat/completions", (route) =>
        route.fulfill({ contentType: "text/event-stream", body: events(...chunks) }));
      await ask(question);
      assert.equal(await lastAnswer().locator(".content").textContent(), "Half");
      assert.equal(await lastAnswer().getByRole("alert").textContent(), told);
      await page.unroute("**/v1/chat/completions");
    }
  });

  test("shows how far a long prompt is read", async () => {
    await page.evaluate(() => {
      const ask = globalThis.fetch;
      globalThis.fetch = (path, options) => {
        if (!path.endsWith("completions")) return ask(path, options);
        const send = (controller, chunk) =>
          controller.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\n\n`));
        const body = new ReadableStream({
          start: (controller) => {
            const choices = [{ index: 0, delta: {}, finish_reason: null }];
            send(controller, { choices, prompt_progress: { total: 2000, cached: 500, processed: 1500 } });
            globalThis.goOn = () => {
              send(controller, { choices: [{ index: 0, delta: { content: "Read." }, finish_reason: "stop" }] });
              controller.close();
            };
          },
        });
        return Promise.resolve(new Response(body));
      };
    });
    await message().fill(question);
    await message().press("Enter");
    await page.getByText("Reading the prompt: 1500 of 2000 tokens (500 from cache)").waitFor();
    const bar = page.getByRole("progressbar", { name: "Reading the prompt" });
    assert.deepEqual(await bar.evaluate(({ value, max }) => [value, max]), [1500, 2000]);
    await page.evaluate(() => globalThis.goOn());
    await answered();
    assert.equal(await bar.count(), 0);
    assert.equal(await lastAnswer().locator(".content").textContent(), "Read.");
  });

  test("treats what the model says as text", async () => {
    const said = [
      "# A heading", "Some **bold** and `code` <b>not</b>", "on two lines", "", "- one", "- **two**", "", "3. three",
      "", "```html", "<script>alert(1)</script>", "```", '<img src="http://evil.example/x" onerror="alert(1)">',
      "<script>globalThis.taken = true</script>", "[link](javascript:alert(1))", "2 * 3 * 4 ** 5",
    ].join("\n");
    const chunk = { choices: [{ index: 0, delta: { content: said, reasoning_content: said }, finish_reason: "stop" }] };
    await page.route("**/v1/chat/completions", (route) =>
      route.fulfill({ contentType: "text/event-stream", body: `data: ${JSON.stringify(chunk)}\n\ndata: [DONE]\n\n` }));
    await ask(question);
    const content = lastAnswer().locator(".content");
    assert.deepEqual(
      await content.evaluate((parent) => [...parent.children].map(({ tagName, textContent }) => [tagName, textContent])),
      [
        ["H3", "A heading"],
        ["P", "Some bold and code <b>not</b>\non two lines"],
        ["UL", "onetwo"],
        ["OL", "three"],
        ["FIGURE", "htmlCopy code<script>alert(1)</script>"],
        ["P", said.split("\n").slice(-4).join("\n")],
      ],
    );
    assert.deepEqual(
      await content.evaluate((parent) => [...parent.querySelectorAll("strong, p code, ol")].map((one) => one.start ?? one.textContent)),
      ["bold", "code", "two", 3],
    );
    assert.equal(await lastAnswer().locator("script, img, a, b").count(), 0);
    assert.equal(await page.evaluate(() => globalThis.taken), undefined);
  });

  test("tells people who do not see it once, when an answer is complete", async () => {
    await page.evaluate(() => {
      globalThis.told = [];
      new MutationObserver(() => globalThis.told.push(document.getElementById("status").textContent)).observe(
        document.getElementById("status"), { childList: true, subtree: true, characterData: true });
    });
    await ask(longQuestion);
    const told = await page.evaluate(() => globalThis.told);
    assert.equal(told.length, 2, `${told}`);
    assert.equal(told[0], "Waiting for the answer");
    assert.match(told[1], /^Answer complete: 1, 2, /);
    // The answer itself is in no live region, which would read each token.
    assert.equal(await lastAnswer().locator(".content").evaluate((one) => one.closest("[aria-live], [role=log], [role=status], [role=alert]")), null);
  });

  test("has names for what assistive technology reads", async () => {
    await ask(question, { thinks: true });
    assert.match(await page.locator("body").ariaSnapshot(), new RegExp([
      "- banner:", '- heading "Lily"', '- button "New chat"', '- button "Settings"', "- main:",
      '- region "Conversation"', '- article "You"', '- article "Lily"', '- group', '- button "Copy"', '- button "Retry"',
      '- form "New message"', '- textbox "Message"', '- checkbox "Think first"', '- button "Send"', "- status",
    ].join("[^]*")));
  });

  test("has no accessibility problem that axe knows, in light and dark, empty and full", async () => {
    for (const colorScheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme });
      await noViolations(`${colorScheme}, empty`);
      await settle({ "Tools, as a JSON array": JSON.stringify(timer) });
      await ask("Set a timer for 5 minutes.", { thinks: true });
      await page.getByText("Thinking").click();
      await noViolations(`${colorScheme}, a tool call`);
      await page.getByRole("button", { name: "New chat" }).click();
      await settle({ "Tools, as a JSON array": "[" });
      await page.getByRole("button", { name: "Settings" }).click();
      await noViolations(`${colorScheme}, wrong tools`);
      await page.getByRole("button", { name: "Settings" }).click();
      await settle({ "Tools, as a JSON array": "" });
      await ask("Write a Python function called add that adds two numbers.");
      await noViolations(`${colorScheme}, code`);
      await page.getByRole("button", { name: "New chat" }).click();
    }
  });

  test("fits a narrow window", async () => {
    await page.setViewportSize({ width: 320, height: 560 });
    await ask("Write a Python function called add that adds two numbers.");
    await page.getByRole("button", { name: "Settings" }).click();
    const [wide, shown] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
    assert.ok(wide <= shown, `${wide} of ${shown}`);
  });

  test("moves nothing for people who ask for that", async () => {
    await page.emulateMedia({ reducedMotion: "reduce" });
    const animated = () => page.evaluate(() => {
      const turn = document.createElement("article");
      turn.className = "writing";
      turn.innerText = "";
      turn.append(Object.assign(document.createElement("div"), { className: "content" }));
      document.body.append(turn);
      const name = getComputedStyle(turn.firstChild, "::after").animationName;
      turn.remove();
      return name;
    });
    assert.equal(await animated(), "none");
    await page.emulateMedia({ reducedMotion: "no-preference" });
    assert.equal(await animated(), "breathe");
  });

  test("is kept by its policy from other scripts, other hosts and frames", async () => {
    expected.push(/Content Security Policy/, /This document requires 'Trusted/);
    const refused = (directive, attempt) => page.evaluate(async ([directive, attempt]) => {
      const seen = new Promise((resolve) => {
        document.addEventListener("securitypolicyviolation", ({ effectiveDirective }) => {
          if (effectiveDirective === directive) resolve("refused");
        });
        setTimeout(resolve, 2000, "taken");
      });
      const attempts = {
        fetch: () => fetch("http://127.0.0.2:9/").catch(() => {}),
        image: () => document.body.append(Object.assign(new Image(), { src: "http://127.0.0.2:9/" })),
        markup: () => document.body.insertAdjacentHTML("beforeend", "<p>markup</p>"),
        style: () => document.body.append(Object.assign(document.createElement("style"), { textContent: "p {}" })),
        frame: () => document.body.append(Object.assign(document.createElement("iframe"), { src: "/" })),
      };
      try {
        attempts[attempt]();
      } catch {
        // Of markup, the browser makes an exception.
      }
      return seen;
    }, [directive, attempt]);
    assert.equal(await refused("connect-src", "fetch"), "refused");
    assert.equal(await refused("img-src", "image"), "refused");
    assert.equal(await refused("require-trusted-types-for", "markup"), "refused");
    assert.equal(await refused("style-src-elem", "style"), "refused");
    assert.equal(await refused("frame-src", "frame"), "refused");
    complaints = complaints.filter((text) => !text.startsWith("a request to http://127.0.0.2"));
    const response = await fetch(server.url);
    assert.equal(response.headers.get("x-frame-options"), "DENY");
    assert.match(response.headers.get("content-security-policy"), /default-src 'none'.*frame-ancestors 'none'/);
  });
});

describe("the chat page of a server with a key", () => {
  let keyed;
  before(async () => {
    keyed = await startServer({ key: "a-secret" });
  });
  after(() => keyed?.stop());
  afterEach(closePage);

  test("asks for the key, and keeps it for the session", async () => {
    await openPage(keyed.url);
    expected.push(/status of 401/);
    const field = page.getByLabel("This server asks for an API key");
    await field.waitFor({ timeout: 5000 });
    await noViolations("key");
    await field.fill("wrong");
    await field.press("Enter");
    await field.waitFor();
    await field.fill("a-secret");
    await field.press("Enter");
    await page.getByText(/^lily-tiny, up to/).waitFor();
    await settle({ Temperature: "0" });
    await ask(question);
    assert.equal(await lastAnswer().locator(".content").textContent(), "38 + 47 = 85");
    const stored = await page.evaluate(() => [JSON.stringify({ ...localStorage }), JSON.stringify({ ...sessionStorage })]);
    assert.doesNotMatch(stored[0], /a-secret/);
    assert.match(stored[1], /a-secret/);
  });
});
