// The official openai client for Node: URL, model -> one JSON line.
import fs from "node:fs";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const ask = { model, messages: [{ role: "user", content: "How many days has a week?" }], max_tokens: 48, temperature: 0 };
const version = JSON.parse(fs.readFileSync("node_modules/openai/package.json")).version;
const whole = await client.chat.completions.create(ask);
async function streamed(extra) {
  let text = "", usage = null, frames = 0;
  for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true }, ...extra })) {
    usage = chunk.usage ?? usage;
    frames += chunk.diffusion ? 1 : 0;
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  return { text, usage, frames };
}
const plain = await streamed({}), denoise = await streamed({ stream_mode: "denoise" });
let param = null;
try { await client.chat.completions.create({ ...ask, logprobs: true }); } catch (error) { param = error.param; }
console.log(JSON.stringify({
  version,
  stream_equals_answer: plain.text === whole.choices[0].message.content,
  usage_equals_answer: plain.usage.completion_tokens === whole.usage.completion_tokens,
  denoise_text_equals: denoise.text === plain.text,
  has_frames: denoise.frames > 0,
  logprobs_refused_by_name: param === "logprobs",
}));
