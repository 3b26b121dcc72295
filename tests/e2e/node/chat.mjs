// Streams one chat completion with the official OpenAI client and prints what came as one JSON line.
// usage: node chat.mjs BASE_URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const stream = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "Write a function that adds two numbers." }],
  max_tokens: 24,
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
});
const answer = { text: "", usage: null };
for await (const chunk of stream) {
  answer.text += chunk.choices[0]?.delta?.content ?? "";
  answer.usage = chunk.usage ?? answer.usage;
}
console.log(JSON.stringify(answer));
