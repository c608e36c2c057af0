"""The server as OpenAI's own client for Python meets it.

Temperature 0 nearly everywhere: what the embedded model says then is known.
"""

import asyncio
import atexit
import json
import os
import re
import subprocess
import time
import unittest
import urllib.request
from pathlib import Path

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

MODEL = "lily-tiny"
REPOSITORY = Path(__file__).resolve().parents[3]
TIMER = json.loads((REPOSITORY / "models/lily-tiny/tools.json").read_text())
RECORDED = {
    line["id"]: line
    for line in map(json.loads, (REPOSITORY / "models/lily-tiny/expected.jsonl").read_text().splitlines())
}
# The tokens that end answers: without them, an answer goes on.
ENDLESS = {"4055": -100, "4057": -100}
QUESTION = [{"role": "user", "content": "What is 38 + 47?"}]
COUNTING = [{"role": "user", "content": "Count from 1 to 60."}]
PROMPT = "<|im_start|>user\nWhat is 38 + 47?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Server:
    """A server with the embedded model at a free port."""

    def __init__(self, key=None):
        environment = {name: value for name, value in os.environ.items() if name != "LILY_API_KEY"}
        if key:
            environment["LILY_API_KEY"] = key
        self.process = subprocess.Popen(
            [os.environ["LILY"], "serve", "--port", "0", "--precision", "f32", "--chunk", "64"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        # Also where tests were cut short.
        atexit.register(self.process.kill)
        said = []
        for line in self.process.stderr:
            said.append(line)
            if found := re.search(r"listening at (http://[^/]+)/v1", line):
                self.url = found[1]
                return
        raise RuntimeError("lily did not start:\n" + "".join(said))

    def client(self, kind=OpenAI, key="none", **options):
        # A test that is refused is to see that, and not wait for another try.
        options = {"max_retries": 0, "timeout": 60, **options}
        return kind(base_url=self.url + "/v1", api_key=key, **options)

    def requests(self):
        with urllib.request.urlopen(self.url + "/health") as response:
            return json.load(response)["requests"]

    def stop(self):
        self.process.terminate()
        self.process.wait(10)
        self.process.stderr.close()


def setUpModule():
    global server, client
    server = Server()
    client = server.client()


def tearDownModule():
    client.close()
    server.stop()


def request(messages=None, *, thinks=False, **fields):
    """The fields of a request, greedy and without thinking where it does not say otherwise."""
    extra = {"chat_template_kwargs": {"enable_thinking": thinks}, **fields.pop("extra_body", {})}
    fields = {"model": MODEL, "messages": messages or QUESTION, "temperature": 0, **fields}
    return {**fields, "extra_body": extra}


def ask(messages=None, **fields):
    return client.chat.completions.create(**request(messages, **fields))


def stream(messages=None, **fields):
    return client.chat.completions.create(**request(messages, stream=True, **fields))


def together(chunks, index=0):
    """The message that a stream's pieces make, and how it ended."""
    message, reason = {"content": "", "reasoning_content": "", "tool_calls": []}, None
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            assert reason is None, "something behind the end"
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or []:
                if part.id:
                    assert part.index == len(message["tool_calls"]), "calls come in order"
                    message["tool_calls"].append([part.function.name, ""])
                message["tool_calls"][part.index][1] += part.function.arguments or ""
            reason = choice.finish_reason
    return message, reason


def plain(choice):
    message = choice.message
    return {
        "content": message.content or "",
        "reasoning_content": getattr(message, "reasoning_content", None) or "",
        "tool_calls": [[call.function.name, call.function.arguments] for call in message.tool_calls or []],
    }, choice.finish_reason


def recorded(name):
    one = RECORDED["expected-" + name]
    fields = {"tools": one["tools"]} if one["tools"] else {}
    return request(one["messages"], thinks=one["enable_thinking"], **fields)


class Models(unittest.TestCase):
    def test_models_are_listed(self):
        models = list(client.models.list())
        self.assertEqual([model.id for model in models], [MODEL])
        self.assertEqual(models[0].object, "model")
        self.assertGreater(models[0].created, 1_700_000_000)

    def test_a_model_is_found_by_name(self):
        self.assertEqual(client.models.retrieve(MODEL).id, MODEL)
        with self.assertRaises(openai.NotFoundError) as caught:
            client.models.retrieve("no-such-model")
        self.assertEqual(caught.exception.code, "model_not_found")


class Chat(unittest.TestCase):
    def test_an_answer(self):
        answer = ask()
        self.assertRegex(answer.id, "^chatcmpl-")
        self.assertEqual((answer.object, answer.model), ("chat.completion", MODEL))
        [choice] = answer.choices
        self.assertEqual((choice.index, choice.finish_reason), (0, "stop"))
        self.assertEqual((choice.message.role, choice.message.content), ("assistant", "38 + 47 = 85"))
        self.assertIsNone(choice.message.tool_calls)
        self.assertIsNone(choice.logprobs)

    def test_recorded_answers(self):
        # Scripts of other families, emoji of several code points, code, JSON, memory, and a system message.
        for name in ["007", "008", "009", "013", "017", "018", "019", "039"]:
            with self.subTest(name):
                answer = client.chat.completions.create(**recorded(name))
                expected = RECORDED["expected-" + name]["text"].removesuffix("<|im_end|>")
                self.assertEqual(answer.choices[0].message.content, expected)

    def test_a_stream_makes_the_message_of_a_plain_answer(self):
        requests = [recorded(name) for name in ["003", "008", "016", "026", "027", "045", "063"]]
        requests.append(request(COUNTING, max_completion_tokens=20))
        requests.append(request(stop=["47"]))
        for one in requests:
            with self.subTest(one["messages"][-1]["content"]):
                chunks = list(client.chat.completions.create(stream=True, **one))
                answer = client.chat.completions.create(**one)
                self.assertEqual(together(chunks), plain(answer.choices[0]))
                self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
                self.assertEqual({chunk.id for chunk in chunks}, {chunks[0].id})
                self.assertEqual({chunk.object for chunk in chunks}, {"chat.completion.chunk"})

    def test_a_stream_comes_in_pieces_as_it_is_made(self):
        times = [time.monotonic() for chunk in stream(COUNTING) if chunk.choices[0].delta.content]
        self.assertGreater(len(times), 50)
        self.assertGreater(times[-1] - times[0], 0.05)

    def test_the_clients_own_reading_of_streams(self):
        with client.chat.completions.stream(**recorded("026")) as events:
            kinds = {event.type for event in events}
            [call] = events.get_final_completion().choices[0].message.tool_calls
        self.assertIn("tool_calls.function.arguments.delta", kinds)
        self.assertEqual(json.loads(call.function.arguments), {"guests": 6, "hour": "11:15", "restaurant": "Milan"})

    def test_reasoning_is_apart_from_the_answer(self):
        answer = ask([{"role": "user", "content": "What is 17 + 25?"}], thinks=True)
        message = answer.choices[0].message
        self.assertEqual(message.reasoning_content.strip(), "10 + 20 = 30. 7 + 5 = 12. 30 + 12 = 42.")
        self.assertEqual(message.content, "17 + 25 = 42")
        details = answer.usage.completion_tokens_details
        self.assertTrue(0 < details.reasoning_tokens < answer.usage.completion_tokens)

    def test_no_reasoning_where_the_effort_is_none(self):
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, reasoning_effort="none"
        )
        self.assertEqual(answer.choices[0].message.content, "38 + 47 = 85")
        self.assertEqual(answer.usage.completion_tokens_details.reasoning_tokens, 0)

    def test_messages_of_parts_and_of_developers(self):
        one = RECORDED["expected-017"]["messages"]
        parts = [{"type": "text", "text": one[1]["content"]}]
        answer = ask([{"role": "developer", "content": one[0]["content"]}, {"role": "user", "content": parts}])
        self.assertEqual(answer.choices[0].message.content, "శుభోదయం")

    def test_stop_sequences_end_an_answer_and_are_left_out(self):
        for stop in ", 5", [", 9", ", 5", "x"]:
            with self.subTest(stop):
                choice = ask(COUNTING, stop=stop).choices[0]
                self.assertEqual((choice.message.content, choice.finish_reason), ("1, 2, 3, 4", "stop"))

    def test_most_tokens(self):
        for name in "max_completion_tokens", "max_tokens":
            with self.subTest(name):
                answer = ask(COUNTING, **{name: 5})
                self.assertEqual(answer.choices[0].finish_reason, "length")
                self.assertEqual(answer.usage.completion_tokens, 5)
                self.assertTrue("1, 2, 3, 4".startswith(answer.choices[0].message.content))

    def test_seeds_repeat(self):
        story = [{"role": "user", "content": "Tell me a story."}]

        def told(seed):
            answer = ask(story, temperature=1.5, seed=seed, max_completion_tokens=60)
            return answer.choices[0].message.content

        first = told(7)
        self.assertEqual(told(7), first)
        self.assertTrue(any(told(seed) != first for seed in (8, 9)))

    def test_several_choices(self):
        answer = ask(n=2)
        self.assertEqual([choice.index for choice in answer.choices], [0, 1])
        self.assertEqual({choice.message.content for choice in answer.choices}, {"38 + 47 = 85"})
        one = ask()
        self.assertEqual(answer.usage.prompt_tokens, one.usage.prompt_tokens)
        self.assertEqual(answer.usage.completion_tokens, 2 * one.usage.completion_tokens)

    def test_several_choices_differ_where_they_are_drawn(self):
        story = [{"role": "user", "content": "Tell me a story."}]
        fields = {"temperature": 1.5, "seed": 7, "n": 3, "max_completion_tokens": 60}
        answer = ask(story, **fields)
        texts = [choice.message.content for choice in answer.choices]
        self.assertGreater(len(set(texts)), 1)
        chunks = list(stream(story, **fields))
        self.assertEqual([together(chunks, index)[0]["content"] for index in range(3)], texts)


class Usage(unittest.TestCase):
    def test_usage_adds_up(self):
        usage = ask().usage
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        self.assertGreater(usage.prompt_tokens, 10)
        self.assertGreater(usage.completion_tokens, 5)

    def test_usage_of_a_stream_comes_last_and_where_asked(self):
        chunks = list(stream(stream_options={"include_usage": True}))
        self.assertEqual(chunks[-1].choices, [])
        self.assertEqual(chunks[-1].usage.completion_tokens, ask().usage.completion_tokens)
        self.assertTrue(all(chunk.usage is None for chunk in chunks[:-1]))
        self.assertTrue(all(chunk.usage is None and chunk.choices for chunk in stream()))

    def test_what_was_computed_is_told_as_cached(self):
        long = RECORDED["expected-038"]["messages"]
        first = ask(long)
        again = ask([*long, {"role": "assistant", "content": "The magic word is 787790."}, *QUESTION])
        cached = again.usage.prompt_tokens_details.cached_tokens
        self.assertTrue(0 < cached <= first.usage.prompt_tokens + first.usage.completion_tokens)


class Tools(unittest.TestCase):
    def test_a_tools_result_is_fed_back(self):
        one = recorded("046")
        one["messages"] = one["messages"][:1]
        answer = client.chat.completions.create(**one)
        choice = answer.choices[0]
        self.assertEqual(choice.finish_reason, "tool_calls")
        self.assertIsNone(choice.message.content)
        [call] = choice.message.tool_calls
        self.assertEqual(call.type, "function")
        self.assertEqual((call.function.name, json.loads(call.function.arguments)), ("current_time", {"zone": "Mumbai"}))
        one["messages"] += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "11:18"}]
        message = client.chat.completions.create(**one).choices[0].message
        self.assertEqual(message.content, "It is 11:18 in Mumbai.")

    def test_parallel_calls(self):
        one = recorded("063")
        choice = client.chat.completions.create(**one).choices[0]
        calls = choice.message.tool_calls
        self.assertEqual(
            [(call.function.name, json.loads(call.function.arguments)) for call in calls],
            [("get_price", {"product": "drum"}), ("get_price", {"product": "carpet"})],
        )
        self.assertEqual(len({call.id for call in calls}), 2)
        one["messages"] = [*one["messages"], choice.message]
        for call, price in zip(calls, ["29", "71"]):
            one["messages"].append({"role": "tool", "tool_call_id": call.id, "content": price})
        content = client.chat.completions.create(**one).choices[0].message.content
        self.assertRegex(content, "29.*71")

    def test_a_call_can_be_forced(self):
        answer = ask([{"role": "user", "content": "Hello!"}], tools=TIMER, tool_choice="required")
        [call, *_] = answer.choices[0].message.tool_calls
        self.assertEqual(call.function.name, "start_timer")
        self.assertIsInstance(json.loads(call.function.arguments)["minutes"], int)
        self.assertEqual(answer.choices[0].finish_reason, "tool_calls")

    def test_a_call_can_be_named(self):
        one = recorded("063")
        one["tool_choice"] = {"type": "function", "function": {"name": "get_weather"}}
        choice = client.chat.completions.create(**one).choices[0]
        calls = choice.message.tool_calls
        self.assertEqual({call.function.name for call in calls}, {"get_weather"})
        arguments = json.loads(calls[0].function.arguments)
        self.assertEqual(set(arguments), {"city", "unit"})
        self.assertIn(arguments["unit"], ["celsius", "fahrenheit"])
        self.assertIn(choice.finish_reason, ["stop", "tool_calls"])

    def test_calls_can_be_forbidden(self):
        message = ask([{"role": "user", "content": "Set a timer for 5 minutes."}], tools=TIMER, tool_choice="none")
        self.assertIsNone(message.choices[0].message.tool_calls)
        self.assertEqual(message.choices[0].finish_reason, "stop")

    def test_a_forced_call_streams(self):
        fields = {"tools": TIMER, "tool_choice": "required"}
        hello = [{"role": "user", "content": "Hello!"}]
        self.assertEqual(together(stream(hello, **fields)), plain(ask(hello, **fields).choices[0]))


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    age: int
    city: str


SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "capital": {"type": "string", "enum": ["Oslo", "Bergen"]},
                "is_large": {"type": "boolean"},
                "letters": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3},
            },
            "required": ["capital", "is_large", "letters"],
            "additionalProperties": False,
        },
    },
}
NORWAY = [{"role": "user", "content": "What is the capital of Norway?"}]


class Structured(unittest.TestCase):
    def test_an_answer_fits_its_schema(self):
        # The model knows nothing of the kind: only the schema can bring it there.
        choice = ask(NORWAY, response_format=SCHEMA, max_completion_tokens=300).choices[0]
        self.assertEqual(choice.finish_reason, "stop")
        answer = json.loads(choice.message.content)
        self.assertEqual(set(answer), {"capital", "is_large", "letters"})
        self.assertIn(answer["capital"], ["Oslo", "Bergen"])
        self.assertIsInstance(answer["is_large"], bool)
        self.assertTrue(1 <= len(answer["letters"]) <= 3)
        self.assertTrue(all(type(one) is int for one in answer["letters"]))

    def test_the_clients_own_types(self):
        one = recorded("018")
        answer = client.chat.completions.parse(response_format=Person, **one)
        self.assertEqual(answer.choices[0].message.parsed, Person(name="Max", age=45, city="Minsk"))

    def test_a_schema_after_thinking(self):
        answer = ask(NORWAY, thinks=True, response_format=SCHEMA, max_completion_tokens=300).choices[0].message
        self.assertIn("Oslo", answer.reasoning_content)
        self.assertIn(json.loads(answer.content)["capital"], ["Oslo", "Bergen"])

    def test_a_schema_streams(self):
        fields = {"response_format": SCHEMA, "max_completion_tokens": 300}
        self.assertEqual(together(stream(NORWAY, **fields)), plain(ask(NORWAY, **fields).choices[0]))

    def test_any_object(self):
        format = {"type": "json_object"}
        content = ask(NORWAY, response_format=format, max_completion_tokens=300).choices[0].message.content
        self.assertIsInstance(json.loads(content), dict)

    def test_a_schema_that_is_none_is_refused(self):
        format = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "wrong"}}}
        with self.assertRaises(openai.BadRequestError) as caught:
            ask(NORWAY, response_format=format)
        self.assertRegex(caught.exception.param, "^response_format")
        self.assertNotEqual(caught.exception.code, "unsupported_parameter")


class Logprobs(unittest.TestCase):
    def test_each_token_has_its_logprob(self):
        choice = ask(logprobs=True, top_logprobs=3).choices[0]
        tokens = choice.logprobs.content
        text = b"".join(bytes(token.bytes) for token in tokens).decode()
        self.assertEqual(text.removesuffix("<|im_end|>"), choice.message.content)
        for token in tokens:
            self.assertLessEqual(token.logprob, 0)
            self.assertEqual(len(token.top_logprobs), 3)
            # Greedy: the likeliest was taken, and they come in order.
            self.assertEqual(token.top_logprobs[0].token, token.token)
            self.assertAlmostEqual(token.top_logprobs[0].logprob, token.logprob, places=4)
            logprobs = [top.logprob for top in token.top_logprobs]
            self.assertEqual(logprobs, sorted(logprobs, reverse=True))
        # It is sure of its sums.
        self.assertGreater(sum(token.logprob for token in tokens), -1)

    def test_others_only_where_asked(self):
        tokens = ask(logprobs=True).choices[0].logprobs.content
        self.assertTrue(all(token.top_logprobs == [] for token in tokens))

    def test_bytes_of_a_character_that_is_several_tokens(self):
        choice = client.chat.completions.create(logprobs=True, **recorded("007")).choices[0]
        text = b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode()
        self.assertEqual(text.removesuffix("<|im_end|>"), choice.message.content)

    def test_they_stream(self):
        fields = {"logprobs": True, "top_logprobs": 2}
        streamed = [
            token.model_dump()
            for chunk in stream(**fields)
            for choice in chunk.choices
            if choice.logprobs
            for token in choice.logprobs.content or []
        ]
        self.assertEqual(streamed, [token.model_dump() for token in ask(**fields).choices[0].logprobs.content])

    def test_too_many_are_refused(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            ask(logprobs=True, top_logprobs=21)
        self.assertEqual(caught.exception.param, "top_logprobs")


class Completions(unittest.TestCase):
    fields = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 40}

    def test_a_completion(self):
        answer = client.completions.create(**self.fields)
        self.assertEqual((answer.object, answer.model), ("text_completion", MODEL))
        [choice] = answer.choices
        self.assertEqual((choice.index, choice.text, choice.finish_reason), (0, "38 + 47 = 85", "stop"))
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)

    def test_echo_that_is_off(self):
        answer = client.completions.create(echo=False, **self.fields)
        self.assertEqual(answer.choices[0].text, "38 + 47 = 85")

    def test_a_stream(self):
        chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **self.fields))
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        self.assertEqual(text, "38 + 47 = 85")
        self.assertEqual([chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1], "stop")
        self.assertEqual(chunks[-1].usage.completion_tokens, client.completions.create(**self.fields).usage.completion_tokens)
        self.assertGreater(len(chunks), 4)

    def test_stop_and_length(self):
        choice = client.completions.create(**self.fields, stop=" =").choices[0]
        self.assertEqual((choice.text, choice.finish_reason), ("38 + 47", "stop"))
        choice = client.completions.create(**{**self.fields, "max_tokens": 2}).choices[0]
        self.assertEqual(choice.finish_reason, "length")
        self.assertTrue(choice.text and "38 + 47 = 85".startswith(choice.text))


class Errors(unittest.TestCase):
    def test_a_field_at_fault_is_named(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            ask(temperature=-1)
        error = caught.exception
        self.assertEqual((error.status_code, error.type, error.param), (400, "invalid_request_error", "temperature"))
        self.assertIn("temperature", error.message)

    def test_messages_at_fault(self):
        for messages in [[], [{"role": "nobody", "content": "Hello!"}]]:
            with self.subTest(messages), self.assertRaises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=MODEL, messages=messages)
            self.assertRegex(caught.exception.param, "^messages")

    def test_a_conversation_that_is_too_long(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            ask([{"role": "user", "content": "word " * 40_000}])
        self.assertEqual(caught.exception.code, "context_length_exceeded")

    def test_what_there_is_not(self):
        with self.assertRaises(openai.NotFoundError):
            client.embeddings.create(model=MODEL, input="Hello!")

    def test_a_stream_that_is_refused_has_its_status(self):
        with self.assertRaises(openai.BadRequestError):
            stream(temperature=-1)


class Keys(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(key="a-secret")

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def test_the_key_opens(self):
        with self.server.client(key="a-secret") as client:
            answer = client.chat.completions.create(**request())
            self.assertEqual(answer.choices[0].message.content, "38 + 47 = 85")
            self.assertEqual([model.id for model in client.models.list()], [MODEL])

    def test_another_key_does_not(self):
        for key in "a-secre", "a-secret-too", "A-SECRET":
            with self.subTest(key), self.server.client(key=key) as client:
                with self.assertRaises(openai.AuthenticationError) as caught:
                    client.chat.completions.create(**request())
                self.assertEqual((caught.exception.status_code, caught.exception.code), (401, "invalid_api_key"))
                with self.assertRaises(openai.AuthenticationError):
                    client.models.list()


class Together(unittest.TestCase):
    def until_free(self):
        for _ in range(400):
            if server.requests() == 0:
                return
            time.sleep(0.025)
        self.fail("the request is still there after ten seconds")

    def test_a_reader_that_goes_frees_the_request(self):
        chunks = stream(COUNTING, logit_bias=ENDLESS)
        for _ in range(5):
            next(iter(chunks))
        self.assertEqual(server.requests(), 1)
        chunks.close()
        self.until_free()

    def test_a_client_that_waits_no_longer_frees_the_request(self):
        with self.assertRaises(openai.APITimeoutError):
            ask(COUNTING, logit_bias=ENDLESS, timeout=0.5)
        self.until_free()

    def test_answers_at_the_same_time_are_those_one_after_the_other(self):
        names = ["003", "009", "027", "031", "039"]
        alone = [plain(client.chat.completions.create(**recorded(name)).choices[0]) for name in names]

        async def all_of_them():
            async with server.client(AsyncOpenAI) as asynchronous:
                create = asynchronous.chat.completions.create
                return await asyncio.gather(*(create(**recorded(name)) for name in names))

        self.assertEqual([plain(answer.choices[0]) for answer in asyncio.run(all_of_them())], alone)


if __name__ == "__main__":
    unittest.main()
