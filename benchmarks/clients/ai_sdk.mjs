// Vercel's AI SDK through its openai-compatible provider, which checks each chunk: URL, model -> one JSON line.
import fs from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, name] = process.argv.slice(2);
const version = JSON.parse(fs.readFileSync("node_modules/ai/package.json")).version;
const result = { version };
const ask = { prompt: "How many days has a week?", maxOutputTokens: 48, temperature: 0, maxRetries: 0 };
for (const [kind, extra] of [["plain", {}], ["denoise", { stream_mode: "denoise" }]]) {
  const provider = createOpenAICompatible({
    name: "dllm", baseURL: url + "/v1", includeUsage: true,
    fetch: (to, options) => fetch(to, options.body?.includes('"stream":true')
      ? { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ...extra }) } : options),
  });
  const errors = [];
  const whole = await generateText({ model: provider(name), ...ask });
  const stream = streamText({ model: provider(name), ...ask, onError: ({ error }) => errors.push(String(error)) });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  result[kind + "_stream_equals_answer"] = text === whole.text && text !== "";
  result[kind + "_usage"] = (await stream.usage).outputTokens === whole.usage.outputTokens;
  result[kind + "_no_error"] = errors.length === 0;
}
console.log(JSON.stringify(result));
