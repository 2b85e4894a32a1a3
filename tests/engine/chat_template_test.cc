// Chat templates against what Hugging Face's environment makes of the same input.
#include "engine/tokenizer/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/engine/chat_template_fixture.h"

namespace qwend {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

std::filesystem::path TemplatePath(const std::string& name) {
  if (name == "chat_template.jinja") return "models/demo/chat_template.jinja";
  return std::filesystem::path("tests/golden/templates") / name;
}

ChatInput ToInput(const Json& messages, const Json& kwargs) {
  ChatInput input;
  input.messages = messages;
  input.tools = kwargs.value("tools", Json());
  input.add_generation_prompt = kwargs.value("add_generation_prompt", true);
  if (kwargs.contains("enable_thinking")) input.enable_thinking = kwargs["enable_thinking"];
  return input;
}

// An error that the template raised has its own words only; any other also names a line.
void ExpectError(const absl::Status& status, const std::string& reference, bool raised) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  int line = 0;
  EXPECT_EQ(WithoutLine(std::string(status.message()), &line), reference);
  EXPECT_EQ(line == 0, raised) << status.message();
}

TEST(ChatTemplateGolden, PublishedTemplatesRenderAsTheReference) {
  const Json golden = ReadTestJson("tests/golden/text-demo.json")["chat"];
  ASSERT_EQ(golden.size(), 3u);
  int cases = 0;
  for (const auto& [name, entries] : golden.items()) {
    SCOPED_TRACE(name);
    const auto parsed = ChatTemplate::Parse(ReadTestFile(TemplatePath(name)));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    for (const Json& entry : entries) {
      SCOPED_TRACE(entry["messages"].dump());
      const auto text = (*parsed)->Render(ToInput(entry["messages"], entry["kwargs"]));
      ++cases;
      if (entry.contains("error")) {
        ASSERT_FALSE(text.ok());
        const std::string reference = entry["error"];
        ExpectError(text.status(), reference, reference != "list object has no element 0");
      } else {
        ASSERT_TRUE(text.ok()) << text.status();
        EXPECT_EQ(*text, entry["text"].get<std::string>());
      }
    }
  }
  EXPECT_EQ(cases, 60);
}

TEST(ChatTemplateGolden, IdiomsOfOtherFamiliesRenderAsJinja) {
  const Json golden = ReadTestJson("tests/golden/jinja-cases.json");
  int cases = 0;
  for (const Json& entry : golden["chats"]) {
    const std::string name = entry["name"];
    SCOPED_TRACE(name + " " + entry["messages"].dump());
    const auto parsed = ChatTemplate::Parse(golden["idioms"][name].get<std::string>());
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    ChatInput input = ToInput(entry["messages"], entry);
    input.bos_token = "<s>";
    input.eos_token = "</s>";
    const auto text = (*parsed)->Render(input);
    ++cases;
    if (entry.contains("error")) {
      ASSERT_FALSE(text.ok()) << *text;
      ExpectError(text.status(), entry["error"], entry["kind"] == "raised");
    } else {
      ASSERT_TRUE(text.ok()) << text.status();
      EXPECT_EQ(*text, entry["text"].get<std::string>());
    }
  }
  EXPECT_EQ(cases, 50);
}

TEST(ChatTemplate, ErrorsNameTheLineOfTheInnermostConstruct) {
  EXPECT_EQ(RenderMessages("a\n{% if true %}\n  {{ missing.x }}\n{% endif %}\n"),
            "error: chat template, line 3: 'missing' is undefined");
  EXPECT_EQ(RenderMessages("a\n\n{{ 1 | nosuch }}"),
            "error: chat template, line 3: no filter named 'nosuch'");
  EXPECT_EQ(RenderMessages("\n{{ 1 is nosuch }}"),
            "error: chat template, line 2: no test named 'nosuch'");
  EXPECT_EQ(RenderMessages("\n\n{% include 'x' %}"),
            "error: chat template, line 3: the statement 'include' is not covered");
  EXPECT_EQ(RenderMessages("{% frob %}"), "error: chat template, line 1: unknown statement 'frob'");
  EXPECT_EQ(RenderMessages("x\n{% if true %}\n\n"),
            "error: chat template, line 2: the block that begins here has no 'endif'");
  EXPECT_EQ(RenderMessages("{% break %}"),
            "error: chat template, line 1: 'break' outside of a loop");
  EXPECT_EQ(RenderMessages("{{ raise_exception('as it is') }}"), "error: as it is");
}

TEST(ChatTemplate, VariablesAreThoseOfApplyChatTemplate) {
  ChatInput input;
  const char* const source =
      "{{ tools }} {{ documents }} {{ add_generation_prompt }} {{ enable_thinking is defined }} "
      "{{ bos_token is defined }} {{ eos_token is defined }} {{ messages }}";
  EXPECT_EQ(RenderOrError(source, input), "None None True False False False []");
  input.enable_thinking = false;
  input.add_generation_prompt = false;
  input.bos_token = "<b>";
  input.tools = Json::array({1});
  EXPECT_EQ(RenderOrError(source, input), "[1] None False True True False []");
}

TEST(ChatTemplate, StrftimeNowGivesTheLocalTime) {
  const std::string format = "%Y-%m-%d";
  const auto today = [&] { return absl::FormatTime(format, absl::Now(), absl::LocalTimeZone()); };
  const std::string before = today();
  const std::string text = RenderMessages("{{ strftime_now('%Y-%m-%d') }}");
  if (before == today()) {
    EXPECT_EQ(text, before);
  }
  EXPECT_EQ(RenderMessages("[{{ strftime_now('') }}{{ strftime_now('%%') }}]"), "[%]");
}

TEST(ChatTemplate, OneTemplateRendersOnManyThreads) {
  const auto parsed = ChatTemplate::Parse(
      "{% macro m(x) %}<{{ x }}>{% endmacro %}{% set ns = namespace(n=0) %}"
      "{% for m2 in messages %}{% set ns.n = ns.n + m2 %}{{ m(m2) }}{% endfor %}{{ ns.n }}");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      ChatInput input;
      const int value = static_cast<int>(t) + 1;
      input.messages = Json::array({value, value});
      const std::string v = std::to_string(value);
      const std::string expected = "<" + v + "><" + v + ">" + std::to_string(2 * value);
      for (int i = 0; i < 200; ++i) {
        const auto text = (*parsed)->Render(input);
        if (!text.ok() || *text != expected) ++wrong[t];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

class ChatTemplateLoad : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = std::filesystem::temp_directory_path() / "qwend-template-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(dir_ / name, std::ios::binary) << text;
  }
  // The rendering of the folder's template, or "error: " and the message.
  std::string Result() {
    const auto loaded = ChatTemplate::Load(dir_);
    if (!loaded.ok()) return "error: " + std::string(loaded.status().message());
    return (*loaded)->Render(ChatInput()).value_or("error");
  }
  std::filesystem::path dir_;
};

TEST_F(ChatTemplateLoad, FileComesBeforeTheConfigKey) {
  EXPECT_EQ(ChatTemplate::Load(dir_).status().code(), absl::StatusCode::kNotFound);
  Write("tokenizer_config.json", R"({"model_max_length": 5, "chat_template": null})");
  EXPECT_EQ(ChatTemplate::Load(dir_).status().code(), absl::StatusCode::kNotFound);
  Write("tokenizer_config.json", R"({"chat_template": "from key {{ 1 + 1 }}"})");
  EXPECT_EQ(Result(), "from key 2");
  Write("chat_template.jinja", "from file {{ 1 }}");
  EXPECT_EQ(Result(), "from file 1");
}

TEST_F(ChatTemplateLoad, TakesTheDefaultOfNamedTemplates) {
  Write("tokenizer_config.json", R"({"chat_template": [{"name": "rag", "template": "no"},
                                                      {"name": "default", "template": "yes"}]})");
  EXPECT_EQ(Result(), "yes");
  Write("tokenizer_config.json", R"({"chat_template": [{"name": "rag", "template": "no"}]})");
  EXPECT_THAT(Result(), HasSubstr("tokenizer_config.json: chat_template is neither"));
}

TEST_F(ChatTemplateLoad, ErrorsNameTheFile) {
  Write("tokenizer_config.json", "{");
  EXPECT_THAT(Result(), HasSubstr("tokenizer_config.json: is not a JSON object"));
  Write("chat_template.jinja", "\n{% if %}");
  EXPECT_THAT(Result(), HasSubstr("chat_template.jinja: chat template, line 2: unexpected '%}'"));
}

}  // namespace
}  // namespace qwend
