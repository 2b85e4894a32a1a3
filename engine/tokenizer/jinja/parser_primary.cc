#include <utility>

#include "engine/tokenizer/jinja/parser.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {

absl::StatusOr<ExprPtr> Parser::ParsePrimary() {
  const int line = Current().line;
  switch (Current().kind) {
    case Token::Kind::kName:
      return ParseNameOrConstant();
    case Token::Kind::kString: {
      std::string text;
      while (Current().kind == Token::Kind::kString) text += Take().text;
      return New(line, Literal{Value(std::move(text))});
    }
    case Token::Kind::kInteger:
    case Token::Kind::kFloat:
      return New(line, Literal{Take().value});
    default:
      break;
  }
  if (Current().IsOperator("(")) return ParseParentheses();
  if (Current().IsOperator("[")) return ParseListDisplay();
  if (Current().IsOperator("{")) return ParseDictDisplay();
  return Unexpected();
}

absl::StatusOr<ExprPtr> Parser::ParseNameOrConstant() {
  const Token token = Take();
  if (token.text == "true" || token.text == "True") return New(token.line, Literal{Value(true)});
  if (token.text == "false" || token.text == "False") {
    return New(token.line, Literal{Value(false)});
  }
  if (token.text == "none" || token.text == "None") return New(token.line, Literal{Value()});
  if (macro_ != nullptr) {
    macro_->reads_varargs = macro_->reads_varargs || token.text == "varargs";
    macro_->reads_kwargs = macro_->reads_kwargs || token.text == "kwargs";
    macro_->reads_caller = macro_->reads_caller || token.text == "caller";
  }
  return New(token.line, Name{token.text});
}

absl::StatusOr<ExprPtr> Parser::ParseParentheses() {
  const int line = Take().line;
  if (SkipOperator(")")) return New(line, ListDisplay{{}, Sequence::Kind::kTuple});
  JINJA_ASSIGN(ExprPtr inner, ParseTuple(/*with_conditional=*/true));
  JINJA_CHECK(ExpectOperator(")"));
  return inner;
}

absl::StatusOr<ExprPtr> Parser::ParseListDisplay() {
  const int line = Take().line;
  ListDisplay node;
  while (!Current().IsOperator("]")) {
    if (!node.items.empty()) JINJA_CHECK(ExpectOperator(","));
    if (Current().IsOperator("]")) break;
    JINJA_ASSIGN(ExprPtr item, ParseExpression());
    node.items.push_back(std::move(item));
  }
  JINJA_CHECK(ExpectOperator("]"));
  return New(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseDictDisplay() {
  const int line = Take().line;
  DictDisplay node;
  while (!Current().IsOperator("}")) {
    if (!node.entries.empty()) JINJA_CHECK(ExpectOperator(","));
    if (Current().IsOperator("}")) break;
    JINJA_ASSIGN(ExprPtr key, ParseExpression());
    JINJA_CHECK(ExpectOperator(":"));
    JINJA_ASSIGN(ExprPtr value, ParseExpression());
    node.entries.emplace_back(std::move(key), std::move(value));
  }
  JINJA_CHECK(ExpectOperator("}"));
  return New(line, std::move(node));
}

absl::StatusOr<ExprPtr> Parser::ParseAttribute(ExprPtr object) {
  const int line = Take().line;
  if (Current().kind == Token::Kind::kInteger) {
    JINJA_ASSIGN(ExprPtr index, New(line, Literal{Take().value}));
    return New(line, Item{std::move(object), std::move(index)});
  }
  JINJA_ASSIGN(std::string name, ExpectName());
  return New(line, Attribute{std::move(object), std::move(name)});
}

absl::StatusOr<ExprPtr> Parser::ParseSubscript(ExprPtr object) {
  const int line = Take().line;
  const auto at_end = [&] { return Current().IsOperator("]") || Current().IsOperator(","); };
  ExprPtr start;
  if (!Current().IsOperator(":")) {
    JINJA_ASSIGN(start, ParseExpression());
  }
  if (Current().IsOperator(",")) {  // a[b, c] asks for the item (b, c)
    ListDisplay key;
    key.kind = Sequence::Kind::kTuple;
    key.items.push_back(std::move(start));
    while (SkipOperator(",")) {
      JINJA_ASSIGN(ExprPtr part, ParseExpression());
      key.items.push_back(std::move(part));
    }
    JINJA_ASSIGN(start, New(line, std::move(key)));
  }
  if (SkipOperator("]")) return New(line, Item{std::move(object), std::move(start)});
  SliceItem node;
  node.object = std::move(object);
  node.start = std::move(start);
  JINJA_CHECK(ExpectOperator(":"));
  if (!Current().IsOperator(":") && !at_end()) {
    JINJA_ASSIGN(node.stop, ParseExpression());
  }
  if (SkipOperator(":") && !at_end()) {
    JINJA_ASSIGN(node.step, ParseExpression());
  }
  JINJA_CHECK(ExpectOperator("]"));
  return New(line, std::move(node));
}

absl::StatusOr<CallArguments> Parser::ParseArguments() {
  const int line = Take().line;
  CallArguments arguments;
  bool first = true;
  while (!Current().IsOperator(")")) {
    if (!first) JINJA_CHECK(ExpectOperator(","));
    first = false;
    if (Current().IsOperator(")")) break;
    if (Current().IsOperator("*")) {
      if (arguments.splat != nullptr || arguments.named_splat != nullptr) {
        return Fail(line, "invalid syntax in a call");
      }
      Take();
      JINJA_ASSIGN(arguments.splat, ParseExpression());
    } else if (Current().IsOperator("**")) {
      if (arguments.named_splat != nullptr) return Fail(line, "invalid syntax in a call");
      Take();
      JINJA_ASSIGN(arguments.named_splat, ParseExpression());
    } else if (Current().kind == Token::Kind::kName && Ahead().IsOperator("=")) {
      const Token name = Take();
      Take();
      for (const auto& [other, unused] : arguments.named) {
        if (other == name.text) {
          return Fail(name.line, Cat("the argument ", ReprText(other), " is given twice"));
        }
      }
      JINJA_ASSIGN(ExprPtr value, ParseExpression());
      arguments.named.emplace_back(name.text, std::move(value));
    } else {
      if (!arguments.named.empty() || arguments.splat != nullptr ||
          arguments.named_splat != nullptr) {
        return Fail(line, "a positional argument follows a named one");
      }
      JINJA_ASSIGN(ExprPtr value, ParseExpression());
      arguments.positional.push_back(std::move(value));
    }
  }
  JINJA_CHECK(ExpectOperator(")"));
  return arguments;
}

}  // namespace qwend::jinja
