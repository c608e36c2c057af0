// The server as an agent's loop meets it, here that of the Vercel AI SDK: it calls tools by itself and asks again with
// their results.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, isStepCount, jsonSchema, Output, streamText, tool } from "ai";
import { z } from "zod";
import { recorded, requests, startServer, until } from "../support.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;

let server;
let model;

before(async () => {
  server = await startServer({ options: ["--chunk", "64"] });
  const provider = createOpenAICompatible({
    name: "lily", baseURL: `${server.url}/v1`, includeUsage: true, supportsStructuredOutputs: true,
  });
  model = provider("lily-tiny");
});
after(() => server?.stop());

const fields = (thinks) => ({
  model,
  temperature: 0,
  maxRetries: 0,
  providerOptions: { lily: { chat_template_kwargs: { enable_thinking: thinks } } },
});

/** Tools as a recording declares them; their results come from a table, and calls are written down. */
function toolsOf(id, results) {
  const calls = [];
  const made = recorded[`expected-${id}`].tools.map(({ function: { name, description, parameters } }) => [
    name,
    tool({
      description,
      inputSchema: jsonSchema(parameters),
      execute: (input) => {
        calls.push([name, input]);
        return results[JSON.stringify(input)] ?? "unknown";
      },
    }),
  ]);
  return { calls, tools: Object.fromEntries(made) };
}

test("an answer, with reasoning and usage", async () => {
  const answer = await generateText({ ...fields(true), prompt: "What is 17 + 25?" });
  assert.equal(answer.text, "17 + 25 = 42");
  assert.equal(answer.reasoningText.trim(), "10 + 20 = 30. 7 + 5 = 12. 30 + 12 = 42.");
  assert.equal(answer.finishReason, "stop");
  assert.equal(answer.usage.totalTokens, answer.usage.inputTokens + answer.usage.outputTokens);
});

test("a stream, with reasoning and usage", async () => {
  const answer = streamText({ ...fields(true), prompt: "What is 17 + 25?" });
  const pieces = [];
  for await (const piece of answer.textStream) pieces.push(piece);
  assert.ok(pieces.length > 3);
  assert.equal(pieces.join(""), "17 + 25 = 42");
  assert.equal((await answer.reasoningText).trim(), "10 + 20 = 30. 7 + 5 = 12. 30 + 12 = 42.");
  assert.ok((await answer.usage).outputTokens > 10);
});

test("the loop calls a tool and answers with its result", async () => {
  const { calls, tools } = toolsOf("046", { '{"zone":"Mumbai"}': "11:18" });
  const answer = await generateText({
    ...fields(true), tools, prompt: "What is the local time in Mumbai?", stopWhen: isStepCount(4),
  });
  assert.deepEqual(calls, [["current_time", { zone: "Mumbai" }]]);
  assert.equal(answer.text, "It is 11:18 in Mumbai.");
  assert.deepEqual(answer.steps.map(({ finishReason }) => finishReason), ["tool-calls", "stop"]);
});

test("the loop streams, with several calls at once", async () => {
  const { calls, tools } = toolsOf("063", { '{"product":"drum"}': "29", '{"product":"carpet"}': "71" });
  const answer = streamText({
    ...fields(false), tools, prompt: "Get the price of the drum. Get the price of the carpet.", stopWhen: isStepCount(4),
  });
  assert.match(await answer.text, /29.*71/);
  assert.deepEqual(calls, [["get_price", { product: "drum" }], ["get_price", { product: "carpet" }]]);
});

test("a forced call", async () => {
  const { tools } = toolsOf("063", {});
  const answer = await generateText({ ...fields(false), tools, toolChoice: "required", prompt: "Hello!" });
  assert.ok(answer.toolCalls.length > 0);
});

test("structured output", async () => {
  const schema = z.object({ capital: z.enum(["Oslo", "Bergen"]), is_large: z.boolean() });
  const answer = await generateText({
    ...fields(false), maxOutputTokens: 300, prompt: "What is the capital of Norway?", output: Output.object({ schema }),
  });
  assert.ok(schema.safeParse(answer.output).success, JSON.stringify(answer.output));
});

test("an error is the SDK's own, with the server's words", async () => {
  const refused = generateText({ ...fields(false), temperature: -1, prompt: "Hello!" });
  await assert.rejects(refused, (error) => {
    assert.ok(APICallError.isInstance(error), `${error}`);
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /temperature/);
    return true;
  });
});

test("an abort frees the request", async () => {
  const abort = new AbortController();
  const endless = { lily: { chat_template_kwargs: { enable_thinking: false }, logit_bias: { 4055: -100, 4057: -100 } } };
  const answer = streamText({
    ...fields(false), providerOptions: endless, prompt: "Count from 1 to 60.", abortSignal: abort.signal, onError: () => {},
  });
  for await (const piece of answer.textStream) {
    if (piece) abort.abort();
  }
  await until("the request is gone", async () => (await requests(server)) === 0);
});
