// A chat in the terminal. usage: node chat.js [ADDRESS]
import { createInterface } from "node:readline/promises";
import { TandemClient } from "tandem-client";

const client = new TandemClient(process.argv[2] ?? "127.0.0.1:50051");
const terminal = createInterface({ input: process.stdin, output: process.stdout });
const messages: { role: string; content: string }[] = [];
process.stdout.write("> ");
for await (const content of terminal) {
  messages.push({ role: "user", content });
  let answer = "";
  for await (const piece of client.generate({ chat: { messages }, sessionId: "terminal", maxTokens: 256 })) {
    process.stdout.write(piece.text);
    answer += piece.text;
  }
  messages.push({ role: "assistant", content: answer });
  process.stdout.write("\n> ");
}
client.close();
