fn main() {
    let mut a = std::env::args().skip(1);
    let file = a.next().unwrap();
    let path = std::path::Path::new(&file);
    let mut s = lily_msl::Sources::new();
    for e in std::fs::read_dir(path.parent().unwrap()).unwrap() {
        let p = e.unwrap().path();
        if matches!(p.extension().and_then(|x| x.to_str()), Some("h" | "metal")) {
            s = s.with(p.file_name().unwrap().to_str().unwrap(), &std::fs::read_to_string(&p).unwrap());
        }
    }
    match lily_msl::cuda::source(&s, path.file_name().unwrap().to_str().unwrap()) {
        Ok(t) => print!("{t}"),
        Err(e) => { eprintln!("{e}"); std::process::exit(1) }
    }
}
