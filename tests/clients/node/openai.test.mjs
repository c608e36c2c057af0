// The server as OpenAI's own client for JavaScript meets it. What is tested of the server's answers in Python is here
// what this client makes of them. Temperature 0 nearly everywhere: what the embedded model says then is known.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import OpenAI from "openai";
import { recorded, requests, startServer, timer, until } from "../support.mjs";

const model = "lily-tiny";
const question = [{ role: "user", content: "What is 38 + 47?" }];
const counting = [{ role: "user", content: "Count from 1 to 60." }];
const norway = [{ role: "user", content: "What is the capital of Norway?" }];
const hello = [{ role: "user", content: "Hello!" }];
// The tokens that end answers: without them, an answer goes on.
const endless = { 4055: -100, 4057: -100 };

let server;
let client;

function clientOf({ url }, apiKey = "none") {
  // A test that is refused is to see that, and not wait for another try.
  return new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, timeout: 60_000 });
}

before(async () => {
  server = await startServer({ options: ["--chunk", "64"] });
  client = clientOf(server);
});
after(() => server?.stop());

/** A request, greedy and without thinking where it does not say otherwise. */
function request(messages, { thinks = false, ...fields } = {}) {
  return { model, messages, temperature: 0, chat_template_kwargs: { enable_thinking: thinks }, ...fields };
}

const ask = (messages, fields) => client.chat.completions.create(request(messages, fields));
const stream = (messages, fields) => ask(messages, { ...fields, stream: true });

function record(id) {
  const { messages, tools, enable_thinking: thinks } = recorded[`expected-${id}`];
  return [messages, { thinks, ...(tools && { tools }) }];
}

async function all(chunks) {
  const list = [];
  for await (const chunk of chunks) list.push(chunk);
  return list;
}

/** The message that a stream's pieces make, and how it ended. */
function together(chunks, index = 0) {
  const made = { content: "", reasoning: "", calls: [], reason: null };
  for (const { delta, finish_reason: reason } of chunks.flatMap(({ choices }) => choices).filter((one) => one.index === index)) {
    assert.equal(made.reason, null, "something behind the end");
    made.content += delta.content ?? "";
    made.reasoning += delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) {
      if (part.id) made.calls.push([part.function.name, ""]);
      made.calls[part.index][1] += part.function.arguments ?? "";
    }
    made.reason = reason;
  }
  return made;
}

function plain({ message, finish_reason: reason }) {
  return {
    content: message.content ?? "",
    reasoning: message.reasoning_content ?? "",
    calls: (message.tool_calls ?? []).map(({ function: { name, arguments: text } }) => [name, text]),
    reason,
  };
}

/** Requires that a promise fails with one of the client's own errors, and gives it. */
async function refused(promise, kind) {
  const error = await promise.then(() => assert.fail("it was not refused"), (error) => error);
  assert.ok(error instanceof kind, `${error.constructor.name}: ${error.message}`);
  return error;
}

test("models are listed", async () => {
  assert.deepEqual((await all(await client.models.list())).map(({ id }) => id), [model]);
});

test("a model is found by name", async () => {
  assert.equal((await client.models.retrieve(model)).id, model);
  const error = await refused(client.models.retrieve("no-such-model"), OpenAI.NotFoundError);
  assert.equal(error.code, "model_not_found");
});

describe("chat", () => {
  test("an answer", async () => {
    const answer = await ask(question);
    assert.match(answer.id, /^chatcmpl-/);
    assert.deepEqual([answer.object, answer.model], ["chat.completion", model]);
    const [{ index, message, logprobs, finish_reason: reason }] = answer.choices;
    assert.deepEqual([answer.choices.length, index, logprobs, reason], [1, 0, null, "stop"]);
    assert.deepEqual([message.role, message.content], ["assistant", "38 + 47 = 85"]);
  });

  for (const id of ["003", "008", "026", "027", "063"]) {
    test(`a stream makes the message of a plain answer: ${recorded[`expected-${id}`].messages.at(-1).content}`, async () => {
      const chunks = await all(await stream(...record(id)));
      assert.deepEqual(together(chunks), plain((await ask(...record(id))).choices[0]));
      assert.equal(chunks[0].choices[0].delta.role, "assistant");
      assert.equal(new Set(chunks.map((chunk) => chunk.id)).size, 1);
    });
  }

  test("the client's own reading of streams", async () => {
    const reading = client.chat.completions.stream(request(...record("026")));
    const pieces = [];
    reading.on("tool_calls.function.arguments.delta", ({ arguments_delta: piece }) => pieces.push(piece));
    const [call] = (await reading.finalChatCompletion()).choices[0].message.tool_calls;
    assert.deepEqual(JSON.parse(call.function.arguments), { guests: 6, hour: "11:15", restaurant: "Milan" });
    assert.equal(pieces.join(""), call.function.arguments);
  });

  test("reasoning is apart from the answer", async () => {
    const { choices: [{ message }], usage } = await ask([{ role: "user", content: "What is 17 + 25?" }], { thinks: true });
    assert.equal(message.reasoning_content.trim(), "10 + 20 = 30. 7 + 5 = 12. 30 + 12 = 42.");
    assert.equal(message.content, "17 + 25 = 42");
    const reasoning = usage.completion_tokens_details.reasoning_tokens;
    assert.ok(0 < reasoning && reasoning < usage.completion_tokens);
  });

  test("stop sequences end an answer and are left out", async () => {
    for (const stop of [", 5", [", 9", ", 5"]]) {
      const [choice] = (await ask(counting, { stop })).choices;
      assert.deepEqual([choice.message.content, choice.finish_reason], ["1, 2, 3, 4", "stop"]);
    }
  });

  test("most tokens", async () => {
    const { choices: [choice], usage } = await ask(counting, { max_completion_tokens: 5 });
    assert.deepEqual([choice.finish_reason, usage.completion_tokens], ["length", 5]);
  });

  test("seeds repeat", async () => {
    const fields = { temperature: 1.5, seed: 7, max_completion_tokens: 40 };
    const told = async (seed) =>
      (await ask([{ role: "user", content: "Tell me a story." }], { ...fields, seed })).choices[0].message.content;
    const first = await told(7);
    assert.equal(await told(7), first);
    assert.ok((await told(8)) !== first || (await told(9)) !== first);
  });

  test("several choices", async () => {
    const answer = await ask(question, { n: 2 });
    assert.deepEqual(answer.choices.map(({ index }) => index), [0, 1]);
    const chunks = await all(await stream(question, { n: 2 }));
    for (const index of [0, 1]) assert.deepEqual(together(chunks, index), plain(answer.choices[index]));
  });

  test("usage, of plain answers and of streams", async () => {
    const { usage } = await ask(question);
    assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
    const chunks = await all(await stream(question, { stream_options: { include_usage: true } }));
    assert.deepEqual(chunks.at(-1).choices, []);
    assert.equal(chunks.at(-1).usage.completion_tokens, usage.completion_tokens);
    assert.ok((await all(await stream(question))).every((chunk) => !chunk.usage));
  });

  test("each token has its logprob", async () => {
    const fields = { logprobs: true, top_logprobs: 2 };
    const { message, logprobs: { content } } = (await ask(question, fields)).choices[0];
    const text = Buffer.from(content.flatMap(({ bytes }) => bytes)).toString();
    assert.equal(text.replace(/<\|im_end\|>$/, ""), message.content);
    assert.ok(content.every(({ token, logprob, top_logprobs: top }) =>
      logprob <= 0 && top.length === 2 && top[0].token === token));
    const chunks = await all(await stream(question, fields));
    const streamed = chunks.flatMap(({ choices }) => choices).flatMap(({ logprobs }) => logprobs?.content ?? []);
    assert.deepEqual(streamed, content);
  });
});

describe("tools", () => {
  test("results of parallel calls are fed back", async () => {
    const [messages, fields] = record("063");
    const { message, finish_reason: reason } = (await ask(messages, fields)).choices[0];
    assert.equal(reason, "tool_calls");
    assert.deepEqual(
      message.tool_calls.map(({ function: { name, arguments: text } }) => [name, JSON.parse(text)]),
      [["get_price", { product: "drum" }], ["get_price", { product: "carpet" }]],
    );
    const results = message.tool_calls.map(({ id }, index) => ({ role: "tool", tool_call_id: id, content: ["29", "71"][index] }));
    const answer = await ask([...messages, message, ...results], fields);
    assert.match(answer.choices[0].message.content, /29.*71/);
  });

  test("the client's own tool loop", async () => {
    const set = [];
    const tools = structuredClone(timer);
    tools[0].function.function = ({ minutes }) => {
      set.push(minutes);
      return "done";
    };
    tools[0].function.parse = JSON.parse;
    const runner = client.chat.completions.runTools(
      request([{ role: "user", content: "Set a timer for 5 minutes." }], { tools, stream: true }));
    assert.notEqual(await runner.finalContent(), "");
    assert.deepEqual(set, [5]);
  });

  test("a call can be forced, named and forbidden", async () => {
    const forced = (await ask(hello, { tools: timer, tool_choice: "required" })).choices[0];
    assert.equal(forced.finish_reason, "tool_calls");
    assert.ok(Number.isInteger(JSON.parse(forced.message.tool_calls[0].function.arguments).minutes));
    const [messages, fields] = record("063");
    const choice = { type: "function", function: { name: "get_weather" } };
    const named = (await ask(messages, { ...fields, tool_choice: choice })).choices[0].message;
    assert.deepEqual([...new Set(named.tool_calls.map((call) => call.function.name))], ["get_weather"]);
    const forbidden = (await ask(messages, { ...fields, tool_choice: "none" })).choices[0].message;
    assert.equal(forbidden.tool_calls, undefined);
  });
});

describe("structured answers", () => {
  const schema = {
    type: "object",
    properties: { capital: { type: "string", enum: ["Oslo", "Bergen"] }, is_large: { type: "boolean" } },
    required: ["capital", "is_large"],
    additionalProperties: false,
  };
  const fields = {
    response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } },
    max_completion_tokens: 300,
  };

  test("an answer fits its schema", async () => {
    const answer = await client.chat.completions.parse(request(norway, fields));
    const { parsed } = answer.choices[0].message;
    assert.deepEqual(Object.keys(parsed).sort(), ["capital", "is_large"]);
    assert.ok(["Oslo", "Bergen"].includes(parsed.capital) && typeof parsed.is_large === "boolean");
    assert.deepEqual(together(await all(await stream(norway, fields))), plain(answer.choices[0]));
  });

  test("any object", async () => {
    const answer = await ask(norway, { response_format: { type: "json_object" }, max_completion_tokens: 300 });
    assert.equal(Object.getPrototypeOf(JSON.parse(answer.choices[0].message.content)), Object.prototype);
  });
});

test("completions, plain and streaming", async () => {
  const prompt = "<|im_start|>user\nWhat is 38 + 47?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
  const fields = { model, prompt, temperature: 0, max_tokens: 40, echo: false };
  const answer = await client.completions.create(fields);
  assert.equal(answer.object, "text_completion");
  assert.deepEqual([answer.choices[0].text, answer.choices[0].finish_reason], ["38 + 47 = 85", "stop"]);
  const chunks = await all(await client.completions.create({ ...fields, stream: true }));
  assert.equal(chunks.map(({ choices: [choice] }) => choice.text).join(""), "38 + 47 = 85");
});

describe("errors", () => {
  test("a field at fault is named", async () => {
    const error = await refused(ask(question, { temperature: -1 }), OpenAI.BadRequestError);
    assert.deepEqual([error.status, error.type, error.param], [400, "invalid_request_error", "temperature"]);
  });

  test("what there is not", async () => {
    await refused(client.embeddings.create({ model, input: "Hello!" }), OpenAI.NotFoundError);
  });

  test("a wrong key", async () => {
    const keyed = await startServer({ key: "a-secret" });
    try {
      const answer = await clientOf(keyed, "a-secret").chat.completions.create(request(question));
      assert.equal(answer.choices[0].message.content, "38 + 47 = 85");
      const refusal = clientOf(keyed, "another").chat.completions.create(request(question));
      const error = await refused(refusal, OpenAI.AuthenticationError);
      assert.deepEqual([error.status, error.code], [401, "invalid_api_key"]);
    } finally {
      await keyed.stop();
    }
  });
});

describe("leaving", () => {
  const gone = () => until("the request is gone", async () => (await requests(server)) === 0);

  test("a reader that goes frees the request", async () => {
    for await (const chunk of await stream(counting, { logit_bias: endless })) {
      if (chunk.choices[0].delta.content) break;
    }
    await gone();
  });

  test("an abort frees the request, with its own error", async () => {
    const reading = client.chat.completions.stream(request(counting, { logit_bias: endless }));
    reading.once("content", () => reading.abort());
    await refused(reading.done(), OpenAI.APIUserAbortError);
    await gone();
  });

  test("a client that waits no longer frees the request", async () => {
    const asked = client.chat.completions.create(request(counting, { logit_bias: endless }), { timeout: 500 });
    await refused(asked, OpenAI.APIConnectionTimeoutError);
    await gone();
  });
});
