//! Grammars of answers, made from what a request asks for.

use crate::ConstraintError;
use crate::limits;
use crate::tools::{self, Tool};
use crate::vocabulary::vocabulary;
use lily_engine::Tokenizer;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use serde_json::Value;
use std::sync::Arc;

/// Makes grammars for one vocabulary.
pub struct Grammars {
    factory: ParserFactory,
    tokenizer: Arc<Tokenizer>,
}

/// What an answer may be.
#[derive(Clone)]
pub struct Grammar(pub(crate) Matcher);

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Grammar")
    }
}

impl Grammars {
    /// Grammars for the vocabulary of `tokenizer`, of which `stop_ids` end an answer.
    ///
    /// # Errors
    /// Where there is no such token, and for vocabularies that grammars cannot be made for.
    pub fn new(tokenizer: Arc<Tokenizer>, stop_ids: &[u32]) -> Result<Self, ConstraintError> {
        let wrong = |reason: String| ConstraintError::Vocabulary(reason);
        if stop_ids.is_empty() {
            return Err(wrong("no token ends an answer".into()));
        }
        let environment: TokEnv = vocabulary(tokenizer.clone(), stop_ids);
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
                .map_err(|error| wrong(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            // What goes wrong is told to the client, who knows its schema, and has no use for the parser's state.
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Grammars { factory, tokenizer })
    }

    /// The tokenizer.
    pub(crate) fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// JSON that a schema describes; `{"type": "object"}` is any object.
    ///
    /// # Errors
    /// For schemas that are not sound, say what cannot be enforced, or are too large.
    pub fn json(&self, schema: &Value) -> Result<Grammar, ConstraintError> {
        check(None, schema)?;
        self.make(TopLevelGrammar::from_json_schema(sparing(schema.clone())))
            .map_err(|reason| ConstraintError::Schema { of: None, reason })
    }

    /// Calls of tools, given in OpenAI's form: of `named` if that is given, of any otherwise; several one behind another
    /// if that is allowed. Where `or_json` is given, an answer of that schema may stand in their place.
    ///
    /// # Errors
    /// As [`json`](Self::json), naming the tool, and where there is no such tool.
    pub fn calls(
        &self,
        tools: &[Value],
        named: Option<&str>,
        several: bool,
        or_json: Option<&Value>,
    ) -> Result<Grammar, ConstraintError> {
        let tools = tools::chosen(tools, named)?;
        if let Some(schema) = or_json {
            check(None, schema)?;
        }
        // Each by itself first, so that what is wrong has a name.
        for tool in &tools {
            check(Some(&tool.name), &tool.parameters)?;
            self.lark(&tools::grammar(
                std::slice::from_ref(tool),
                false,
                None,
                &self.tokenizer,
            )?)
            .map_err(|reason| tool.wrong(reason))?;
        }
        self.lark(&tools::grammar(&tools, several, or_json, &self.tokenizer)?)
            .map_err(|reason| ConstraintError::Schema { of: None, reason })
    }

    /// The rest of a call that the model has begun by itself, of tools whose arguments are to be held to their schemas
    /// (`strict`) or not.
    ///
    /// # Errors
    /// As [`calls`](Self::calls).
    pub fn rest_of_call(&self, tools: &[Value]) -> Result<Grammar, ConstraintError> {
        let tools: Vec<Tool> = tools::chosen(tools, None)?;
        for tool in tools.iter().filter(|tool| tool.is_strict) {
            check(Some(&tool.name), &tool.parameters)?;
        }
        self.lark(&tools::rest_of_call(&tools, &self.tokenizer)?)
            .map_err(|reason| ConstraintError::Schema { of: None, reason })
    }

    fn lark(&self, grammar: &str) -> Result<Grammar, String> {
        self.make(TopLevelGrammar::from_lark(grammar.to_string()))
    }

    fn make(&self, grammar: TopLevelGrammar) -> Result<Grammar, String> {
        let mut matcher = Matcher::new(self.factory.create_parser(grammar));
        // An error of the grammar waits in the matcher until it is asked.
        match matcher.compute_mask_or_eos() {
            Ok(_) => Ok(Grammar(matcher)),
            Err(error) => Err(first_line(&error.to_string())),
        }
    }
}

/// A schema of JSON with little white space: between two tokens of it one space, or a new line and what it is indented by.
/// Where any amount may stand, a model that is kept from saying what it wants to can go on with it without end.
pub(crate) fn sparing(mut schema: Value) -> Value {
    if schema.is_object() {
        let options = JsonCompileOptions {
            whitespace_pattern: Some(r"\x20|\n\x20{0,16}".into()),
            ..JsonCompileOptions::default()
        };
        options.apply_to(&mut schema);
    }
    schema
}

fn check(of: Option<&str>, schema: &Value) -> Result<(), ConstraintError> {
    match limits::excess(schema) {
        None => Ok(()),
        Some(reason) => Err(ConstraintError::Schema {
            of: of.map(String::from),
            reason,
        }),
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_string()
}
