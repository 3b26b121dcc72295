import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const { TANDEM_URL, TANDEM_MODEL: name } = process.env;
const baseURL = `${TANDEM_URL}/v1`;
const models = {
  openai: createOpenAI({ baseURL, apiKey: "none" }).chat(name),
  "openai responses": createOpenAI({ baseURL, apiKey: "none" }).responses(name),
  "openai-compatible": createOpenAICompatible({
    name: "tandem",
    baseURL,
    supportsStructuredOutputs: true,
    includeUsage: true,
  })(name),
};
const schema = z.strictObject({ word: z.enum(["yes", "no"]), sure: z.boolean() });
const prompt = "Is 7 a prime number?";

for (const [provider, model] of Object.entries(models)) {
  const given = { model, prompt, maxOutputTokens: 16, temperature: 0, maxRetries: 0 };

  test(`${provider}: generateText and streamText`, async () => {
    const whole = await generateText(given);
    assert.equal(whole.usage.outputTokens, 16);
    const stream = streamText(given);
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, 16);
  });

  test(`${provider}: generateObject and streamObject`, async () => {
    const wanted = { ...given, schema, maxOutputTokens: 200 };
    const { object } = await generateObject(wanted);
    assert(schema.parse(object));
    const stream = streamObject(wanted);
    for await (const _ of stream.partialObjectStream);
    assert.deepEqual(await stream.object, object);
  });

  test(`${provider}: tools`, async () => {
    const called = [];
    const execute = (input) => called.push(input) && "done";
    const vote = tool({ description: "Votes.", inputSchema: schema, execute });
    // The model knows no tools, and would call one over and over.
    const providerOptions = { openai: { parallelToolCalls: false }, tandem: { parallel_tool_calls: false } };
    const steps = { ...given, providerOptions, tools: { vote }, toolChoice: "required", maxOutputTokens: 200, stopWhen: stepCountIs(2) };
    const answer = await generateText(steps);
    assert.equal(answer.steps.length, 2);
    assert(called.every((input) => schema.parse(input)));
    const stream = streamText({ ...steps, stopWhen: stepCountIs(1) });
    const kinds = [];
    for await (const part of stream.fullStream) kinds.push(part.type);
    assert(kinds.includes("tool-call") && kinds.includes("tool-result"), kinds.join());
  });

  test(`${provider}: messages`, async () => {
    const messages = [
      { role: "user", content: "Name a language." },
      { role: "assistant", content: "Python." },
      { role: "user", content: [{ type: "text", text: "Another one." }] },
    ];
    const answer = await generateText({ ...given, prompt: undefined, system: "Be brief.", messages });
    assert(answer.usage.inputTokens > 10);
  });
}
