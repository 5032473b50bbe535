// Streamed text with a tool, and an object, by the AI SDK: a line of JSON. Arguments: the address and the name
// of the model that calls tools, and of the one that writes the object.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const models = [0, 2].map((i) => {
  const [baseURL, model] = process.argv.slice(2 + i);
  const common = { name: 'orca', apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true };
  return createOpenAICompatible({ ...common, baseURL })(model);
});
const limits = { maxRetries: 0, maxOutputTokens: 200 };
const place = z.enum(['Rome', 'Oslo']);
const stream = streamText({
  ...limits,
  model: models[0],
  tools: {
    weather: tool({
      description: 'The weather at a place',
      inputSchema: z.object({ place }),
      execute: async ({ place }) => `${place}: sleet`,
    }),
  },
  stopWhen: stepCountIs(3),
  prompt: 'What is the weather in Rome?',
});
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);
const { object } = await generateObject({
  ...limits,
  model: models[1],
  schema: z.object({ place }),
  prompt: 'Rome?',
});
const steps = (await stream.steps).map((step) => step.finishReason);
console.log(JSON.stringify({ pieces, steps, usage: await stream.totalUsage, object }));
