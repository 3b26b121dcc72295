import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const { TANDEM_URL, TANDEM_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${TANDEM_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name a language." }];

test("completions", async () => {
  const given = { model, prompt: "def add(a, b):\n", max_tokens: 16, temperature: 0 };
  const whole = await client.completions.create(given);
  let text = "";
  for await (const chunk of await client.completions.create({ ...given, stream: true })) text += chunk.choices[0].text;
  assert.equal(text, whole.choices[0].text);
});

test("chat", async () => {
  const given = { model, messages, max_tokens: 16, temperature: 0 };
  const whole = await client.chat.completions.create({ ...given, logprobs: true, top_logprobs: 2, n: 2 });
  assert.equal(whole.choices.length, 2);
  assert.equal(whole.choices[0].logprobs.content.length, 16);
  const stream = client.chat.completions.stream(given);
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
});

test("parse", async () => {
  const schema = {
    type: "object",
    properties: { word: { enum: ["yes", "no"] }, sure: { type: "boolean" } },
    required: ["word", "sure"],
    additionalProperties: false,
  };
  const answer = await client.chat.completions.parse({
    model,
    messages,
    max_tokens: 200,
    response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
  });
  assert.match(JSON.parse(answer.choices[0].message.content).word, /yes|no/);
});

test("errors", async () => {
  await assert.rejects(client.completions.create({ model: "nobody", prompt: "x" }), OpenAI.NotFoundError);
  await assert.rejects(client.completions.create({ model, prompt: "x", temperature: -1 }), OpenAI.BadRequestError);
});

test("cancelling", async () => {
  const stream = await client.completions.create({ model, prompt: "x", max_tokens: 2000, stream: true });
  let pieces = 0;
  for await (const _ of stream) {
    pieces += 1;
    stream.controller.abort();
  }
  assert(pieces < 50);
});

const parameters = {
  type: "object",
  properties: { word: { enum: ["yes", "no"] } },
  required: ["word"],
  additionalProperties: false,
};

test("tools", async () => {
  const answer = await client.chat.completions.create({
    model,
    messages,
    max_tokens: 100,
    tools: [{ type: "function", function: { name: "vote", description: "Votes.", parameters } }],
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const [call] = answer.choices[0].message.tool_calls;
  assert.match(JSON.parse(call.function.arguments).word, /yes|no/);
});

test("responses", async () => {
  const first = await client.responses.create({ model, input: "Name a language.", max_output_tokens: 16 });
  const stream = client.responses.stream({
    model,
    input: "Vote.",
    previous_response_id: first.id,
    max_output_tokens: 100,
    tools: [{ type: "function", name: "vote", description: "Votes.", parameters, strict: true }],
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const last = await stream.finalResponse();
  const call = last.output.find((item) => item.type === "function_call");
  assert.match(JSON.parse(call.arguments).word, /yes|no/);
});
