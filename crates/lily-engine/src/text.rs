//! The text side of a checkpoint: tokenizer, chat template, defaults, stop ids.

use crate::error::EngineError;
use lily_checkpoint::Checkpoint;
use lily_sampling::SamplingParameters;
use lily_text::{ChatTemplate, GenerationDefaults, RenderRequest, TemplateError, Tokenizer};
use serde_json::{Map, Value};
use std::sync::Arc;

/// What turns messages into tokens and tokens into text.
pub struct TextModel {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    defaults: GenerationDefaults,
    stop_ids: Vec<u32>,
}

/// A conversation to render.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// Messages in OpenAI's form.
    pub messages: Vec<Value>,
    /// Tools in OpenAI's form.
    pub tools: Vec<Value>,
    /// Further variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

impl TextModel {
    /// Reads the small files of a checkpoint. A checkpoint without a chat template still completes plain
    /// text.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self, EngineError> {
        let read = |name: &str| -> Result<Option<String>, EngineError> {
            checkpoint
                .small_text(name)
                .transpose()
                .map_err(|error| EngineError::TextFile {
                    file: name.to_string(),
                    reason: error.to_string(),
                })
        };
        let failed = |file: &str, reason: String| EngineError::TextFile {
            file: file.to_string(),
            reason,
        };
        let json = read("tokenizer.json")?
            .ok_or_else(|| failed("tokenizer.json", "missing from the checkpoint".into()))?;
        let tokenizer = Tokenizer::from_bytes(json.as_bytes())
            .map_err(|error| failed("tokenizer.json", error.to_string()))?;
        let config = read("tokenizer_config.json")?;
        let template = match ChatTemplate::from_files(
            read("chat_template.jinja")?.as_deref(),
            config.as_deref(),
        ) {
            Ok(template) => Some(template.with_late_system_messages()),
            Err(TemplateError::Missing) => None,
            Err(error) => return Err(failed("chat template", error.to_string())),
        };
        let defaults = match read("generation_config.json")? {
            Some(json) => GenerationDefaults::parse(&json)
                .map_err(|error| failed("generation_config.json", error.to_string()))?,
            None => GenerationDefaults::default(),
        };
        // generation_config.json has the last word on where to stop.
        let mut stop_ids = defaults.eos_token_ids.clone();
        if stop_ids.is_empty() {
            stop_ids = checkpoint.config().eos_token_ids.clone();
        }
        let vocabulary = checkpoint.config().vocab_size;
        if let Some(id) = stop_ids.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(failed(
                "generation_config.json",
                format!("eos_token_id {id} of a vocabulary of {vocabulary} rows"),
            ));
        }
        Ok(TextModel {
            tokenizer: Arc::new(tokenizer),
            template,
            defaults,
            stop_ids,
        })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Tokens that end an answer.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Ids at and above this have no token: rows of the head that were never trained.
    pub fn token_limit(&self, vocab_size: usize) -> u32 {
        self.tokenizer.id_bound().min(vocab_size) as u32
    }

    /// The checkpoint's own sampling parameters, for a request that names none.
    pub fn default_sampling(&self) -> SamplingParameters {
        let defaults = &self.defaults;
        let mut parameters = SamplingParameters::default();
        if defaults.do_sample == Some(false) {
            return parameters;
        }
        parameters.temperature = defaults.temperature.unwrap_or(1.0);
        parameters.top_k = defaults.top_k.filter(|&k| k > 0);
        parameters.top_p = defaults.top_p.unwrap_or(1.0);
        parameters.min_p = defaults.min_p.filter(|&p| p < 1.0).unwrap_or(0.0);
        parameters.repetition_penalty = defaults.repetition_penalty.unwrap_or(1.0);
        parameters.presence_penalty = defaults.presence_penalty.unwrap_or(0.0);
        parameters.frequency_penalty = defaults.frequency_penalty.unwrap_or(0.0);
        parameters
    }

    /// The tokens of a prompt for a context of `context` tokens. A text that cannot fit is refused before
    /// the work of cutting it up is done.
    pub fn encode(&self, prompt: &str, context: usize) -> Result<Vec<u32>, EngineError> {
        // Normalisation composes characters: it may shorten a text, to a third of its bytes at most.
        let longest = 3 * self.tokenizer.longest_token();
        if prompt.len() / longest > context {
            return Err(EngineError::PromptTooLong {
                bytes: prompt.len(),
                context,
            });
        }
        self.tokenizer
            .encode(prompt)
            .map_err(|error| EngineError::TextFile {
                file: "tokenizer.json".into(),
                reason: error.to_string(),
            })
    }

    /// The prompt of a conversation, up to where the answer begins. System messages may stand anywhere, with the templates
    /// that are known ([`ChatTemplate::with_late_system_messages`]).
    ///
    /// # Errors
    ///
    /// What the template refuses, and images and videos: the template would put placeholders for them into
    /// the prompt, and the model would answer as if it had seen something.
    pub fn render(&self, conversation: &Conversation) -> Result<String, TemplateError> {
        self.render_up_to(conversation, true)
    }

    /// [`render`](Self::render), with the beginning of an answer or without.
    ///
    /// # Errors
    ///
    /// As [`render`](Self::render).
    pub fn render_up_to(
        &self,
        conversation: &Conversation,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        for (index, message) in conversation.messages.iter().enumerate() {
            if let Some(part) = unreadable_part(message) {
                let reason = format!("a part of type {part}: only text is read");
                return Err(TemplateError::Message { index, reason });
            }
        }
        let template = self.template.as_ref().ok_or(TemplateError::Missing)?;
        template.render(&RenderRequest {
            messages: &conversation.messages,
            tools: Some(conversation.tools.as_slice()).filter(|tools| !tools.is_empty()),
            add_generation_prompt,
            variables: &conversation.variables,
        })
    }
}

/// The type of the first part of a message that is not text.
fn unreadable_part(message: &Value) -> Option<String> {
    let parts = message.get("content")?.as_array()?;
    parts.iter().find_map(|part| {
        let named = part
            .get("type")
            .and_then(Value::as_str)
            .filter(|&name| name != "text");
        let keyed = ["image", "image_url", "video", "video_url", "input_audio"]
            .into_iter()
            .find(|key| part.get(key).is_some());
        named.or(keyed).map(str::to_string)
    })
}
